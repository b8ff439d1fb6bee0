"""Updates by SGLang's protocol, into a stand-in (tests/support/update/sglang.py): not run with SGLang itself.

The stand-in is a process; the endpoint, its adapter and its sockets are what is shipped, but for buffers, which are on
the host here and have handles of CUDA's shape.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from tests.support.update.models import SMALL, model, numbers, source_of
from tests.support.update.sglang import checksum_of, host_buffers
from treadle.update import Endpoint, UpdateError, UpdateOptions, Updater
from treadle.update.adapters.sglang import SGLang
from treadle.update.adapters.sglang.server import Server
from treadle.weights.layouts import spread
from treadle.weights.tensor_boxes import Box

pytest.importorskip("zmq")
pytestmark = pytest.mark.slow

OPTIONS = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=1, rollback="host")


def weights(version: int) -> dict[str, torch.Tensor]:
    return {
        t.name: torch.from_numpy(numbers(t, Box.whole(t.shape), version)).view(torch.bfloat16) for t in model(1, 32)
    }


def update(rank: int, places: tuple[Path, Path], version: int) -> str:
    """The error of an update; "" if it succeeded."""
    with Updater(places[0], ledger=places[1], options=OPTIONS) as updater:
        try:
            updater.update(source_of(spread(model(1, 32), 1), 0, version), version)
        except UpdateError as error:
            return f"committed={error.committed} {error}"
    return ""


class Engine:
    """The stand-in's process, and an endpoint beside it."""

    def __init__(self, directory: Path) -> None:
        self.places = directory / "s", directory / "l"
        self.places[0].mkdir(mode=0o700)
        port = directory / "port"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.update.sglang", port], stdin=subprocess.PIPE
        )
        until = time.monotonic() + PATIENT_S
        while not port.exists():
            assert time.monotonic() < until
            assert self.process.poll() is None
            time.sleep(0.05)
        self.url = f"http://127.0.0.1:{port.read_text()}"
        model_path = directory / "model"
        model_path.mkdir()
        save_file(weights(0), model_path / "model.safetensors")
        largest = max(t.size_bytes for t in model(1, 32))
        with pytest.raises(ValueError, match="the largest tensor has"):
            SGLang(self.url, model_path, host_buffers(directory, largest - 1), directory / "ipc")
        buffers = host_buffers(directory, 2 * largest)
        self.right = {version: checksum_of(weights(version)) for version in (3, 4)}
        adapter = SGLang(
            self.url, model_path, buffers, directory / "ipc", expected=self.right.get, deadline_s=PATIENT_S
        )
        self.endpoint = Endpoint(adapter, self.places[0], 0)
        self.sockets = directory / "ipc"

    def update(self, version: int) -> str:
        (told,) = check(run_ranks(1, update, self.places, version))
        return told

    def look(self) -> dict[str, Any]:
        return Server(self.url, None, 60)._post("look", {})

    def trouble(self, rank: int, what: str) -> None:
        Server(self.url, None, 60)._post("trouble", {"rank": rank, "what": what})

    def close(self) -> None:
        self.endpoint.close()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory(prefix="treadle-sg") as directory:
        made = Engine(Path(directory))
        try:
            yield made
        finally:
            made.close()


def test_versions_failures_on_one_rank_and_a_hook_that_fails_in_silence(engine: Engine) -> None:
    def serves(version: int) -> bool:
        seen = engine.look()
        return not seen["paused"] and seen["per_engine_checksum"] == checksum_of(weights(version))

    assert engine.look()["paused"], "nobody knows the version of its first weights"
    assert engine.update(1) == ""
    seen = engine.look()
    assert not seen["paused"]
    assert seen["per_engine_checksum"] == checksum_of(weights(1))
    order = ["pause_generation", "update_weights_from_ipc", "flush_cache", "continue_generation"]
    assert list(dict.fromkeys(call for call in seen["calls"] if call in order)) == order
    for what in ("map", "load"):
        engine.trouble(1, what)
        told = engine.update(2)
        assert f"trouble in {what}" in told
        assert "committed=False" in told
        assert serves(1), "both ranks have the old version again"
    engine.trouble(0, "post hook")
    told = engine.update(3)
    assert "committed=True" in told
    assert f"and {engine.right[3]} as it is expected" in told
    assert engine.look()["paused"]
    assert engine.update(4) == ""
    assert serves(4)
    assert list(engine.sockets.iterdir()) == []
    assert engine.sockets.stat().st_mode & 0o077 == 0


def test_a_server_that_is_gone_is_named(engine: Engine) -> None:
    assert engine.update(1) == ""
    engine.process.kill()
    engine.process.wait()
    told = engine.update(2)
    assert "committed=False" in told
    assert f"SGLang at {engine.url}: pause_generation: {engine.url} does not answer" in told
