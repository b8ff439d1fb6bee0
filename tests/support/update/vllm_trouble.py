"""A vLLM worker extension with faults, for tests of weight updates. vLLM imports it in its workers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from treadle.update.adapters.vllm import Extension
from treadle.update.worker.endpoint import Endpoint


class TroubledExtension(Extension):
    """The extension, until a fault is asked for."""

    def treadle_trouble(self, worker: int, act: str, method: str, at: int, hang_s: float, mark: str) -> str | None:
        """Commit a fault at the `at`-th call of the adapter's method, once."""
        endpoint = self.treadle_endpoint
        if endpoint is None or endpoint.worker.worker != worker:
            return None
        adapter, calls = endpoint.worker.adapter, iter(range(1 << 30))
        real = getattr(type(adapter), method)

        def troubled(*args: Any) -> Any:
            if next(calls) == at:
                delattr(adapter, method)
                Path(mark).write_text(str(time.monotonic()))
                _act(endpoint, act, hang_s)
            return real(adapter, *args)

        setattr(adapter, method, troubled)
        return None


def _act(endpoint: Endpoint, act: str, hang_s: float) -> None:
    if act == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif act == "hang":
        time.sleep(hang_s)
    elif act == "socket":
        for link in list(endpoint._links.links):
            link.shut()
    else:
        raise RuntimeError("trouble")
