"""The adapter of one SGLang server, of any number of tensor-parallel ranks. It runs in a process beside the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from treadle.update.adapters.sglang.ipc_session import EngineBuffer, IpcSession, SessionError, room_of
from treadle.update.adapters.sglang.server import Server, ServerError
from treadle.update.protocol.update_messages import WeightLayout
from treadle.update.rank.checkpoint import described
from treadle.update.worker.arrived_boxes import Arrival, Leaving
from treadle.weights.tensor_boxes import Box, Piece


class SGLang:
    """Takes every tensor of the checkpoint whole: SGLang's loaders cut them for each rank.

    The server's own pause is the gate: it is paused from here on, until a version is committed. It cannot drain:
    running requests are broken off. All ranks load before any error is known, and SGLang does not go back: the old
    version is loaded again in the same way, from the endpoint's rollback copy.

    SGLang reports success where its post hook has failed. So a checksum is compared before the server opens: with
    `expected`, and with the one that the version had when it was first served.

    Args:
        url: The server's, on this host. `--dp-size` is 1.
        checkpoint: A directory of safetensors files with the names and shapes of updates.
        buffers: A buffer on each of the server's devices: `gpu_buffers`.
        directory: A directory of mode 0700 for the sockets to the engine.
        expected: Returns the checksum that a version must have (`per_engine_checksum` of `/weights_checker`), such as
            that of a server that has loaded it afresh; None where it is not known.
        api_key: The server's admin key, if it has one.
        deadline_s: Seconds of each wait for the server.

    """

    can_export = False
    whole = True

    def __init__(
        self,
        url: str,
        checkpoint: Path,
        buffers: Mapping[str, EngineBuffer],
        directory: Path,
        *,
        expected: Callable[[int], str | None] = lambda version: None,
        api_key: str | None = None,
        deadline_s: float = 120.0,
    ) -> None:
        tensors = tuple(described(checkpoint))
        self._layout = WeightLayout(tensors, tuple(Piece(t.name, Box.whole(t.shape)) for t in tensors))
        largest, room = max(t.size_bytes for t in tensors), min(each.tensor.numel() for each in buffers.values())
        if largest > room:
            raise ValueError(f"the largest tensor has {largest} bytes, the smallest buffer {room}; make them larger")
        self.server = Server(url, api_key, deadline_s)
        self._buffers, self._directory, self._deadline_s = buffers, directory, deadline_s
        self._expected, self._right = expected, dict[int, str]()
        self._session: IpcSession | None = None
        self._call: threading.Thread | None = None
        self._failed: str | None = None
        self._came: set[str] = set()
        self.server.pause()

    @property
    def device(self) -> torch.device:
        """The device of the first buffer."""
        return next(iter(self._buffers.values())).tensor.device

    def layout(self) -> WeightLayout:
        """All tensors of the checkpoint."""
        return self._layout

    def close(self, how: str, deadline_s: float) -> str | None:
        """Pause the server; requests are broken off, whatever `how` is."""
        return self._try(self.server.pause)

    def begin(self) -> str | None:
        """Have all ranks of the server connect."""
        return self._try(self._begin) if self._session is None else None

    def load(self, arrivals: Sequence[Arrival]) -> str | None:
        """Send copies through the buffers, as many at a time as fit."""
        return self._try(lambda: self._load(arrivals))

    def finish(self) -> str | None:
        """End the load on all ranks. Fails where tensors are missing, or the server reports an error."""
        if self._session is None:
            return None
        num, came = len(self._layout.tensors), len(self._came)
        if came < num:
            return f"SGLang loads whole checkpoints, and {came} of {num} tensors came"
        return self._try(self._finish)

    def invalidate(self) -> str | None:
        """Flush the server's cache."""
        return self._try(self.server.flush_cache)

    def lease(self, until_ns: int | None) -> str | None:
        """Refuse an end: the server answers by itself, and does not look at the time."""
        return "SGLang cannot stop when a lease ends; update it without lease_s" if until_ns is not None else None

    def open(self, version: int) -> str | None:
        """Compare the checksum, and let requests in."""
        return self._try(lambda: self._open(version))

    def abort(self) -> str | None:
        """Break a load off. Ranks may hold parts of two versions then; the server stays paused."""
        self._end()
        return None

    def export(self, leaving: Leaving) -> str | None:
        """Fail: ranks hold what their loaders have made of the weights."""
        return f"SGLang cannot hand out {leaving.boxes.names[0]}; give the source that has this version to recover()"

    def _try(self, do: Callable[[], None]) -> str | None:
        try:
            do()
        except (ServerError, SessionError) as error:
            return f"SGLang at {self.server.url}: {error}"
        return None

    def _begin(self) -> None:
        self._came.clear()
        self._failed = None
        self._session = session = IpcSession(self._directory, self._buffers, self._deadline_s, self._ended)
        self._call = threading.Thread(target=self._update, args=(session.handles,), name="treadle sglang", daemon=True)
        self._call.start()
        try:
            session.begin()
        except SessionError:
            self._end()
            raise

    def _update(self, handles: dict[str, str]) -> None:
        try:
            self.server.update_from_ipc(handles)
        except ServerError as error:
            self._failed = str(error)

    def _ended(self) -> str | None:
        """Why the server's call has ended; None while it is under way."""
        if self._call is None or self._call.is_alive():
            return None
        return self._failed if self._failed is not None else "it reported success"

    def _load(self, arrivals: Sequence[Arrival]) -> None:
        if self._session is None:
            raise SessionError("no load has begun")
        together: list[tuple[str, torch.Tensor]] = []
        room = self._session.buffer_bytes
        for arrival in arrivals:
            own = torch.empty(arrival.box.shape, dtype=arrival.tensor.dtype, device=arrival.tensor.device)
            arrival.copy_into(own)
            if room_of(own) > room:
                self._session.load(together)
                together, room = [], self._session.buffer_bytes
            together.append((arrival.name, own))
            room -= room_of(own)
        if together:
            self._session.load(together)
        self._came.update(arrival.name for arrival in arrivals)

    def _finish(self) -> None:
        assert self._session is not None
        assert self._call is not None
        try:
            self._session.finish()
            self._call.join(self._deadline_s)
            if self._call.is_alive():
                raise SessionError(f"update_weights_from_ipc did not return within {self._deadline_s:g} s")
        finally:
            self._end()
        if self._failed is not None:
            raise SessionError(self._failed)

    def _end(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()
        if self._call is not None:
            self._call.join(self._deadline_s)
            self._call = None

    def _open(self, version: int) -> None:
        found = self.server.checksum()
        with suppress(KeyError):
            self._compare(version, found, self._right[version], "when it was first served")
        expected = self._expected(version)
        if expected is not None:
            self._compare(version, found, expected, "as it is expected")
        self._right = {version: found}
        self.server.resume()

    def _compare(self, version: int, found: str, right: str, when: str) -> None:
        if found != right:
            raise SessionError(
                f"version {version} has checksum {found}, and {right} {when}: a rank has not loaded it, or its post "
                "hook failed (the server's log has the reason); update again, or start the server again"
            )
