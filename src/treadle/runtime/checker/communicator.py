"""A communicator as NCCL has it: a stream of its own, which waits for the current one; `Work.wait` is the way back.

gloo moves the numbers. It gets copies, as its threads let go of tensors when they like.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from treadle.runtime.checker.aside import not_noted
from treadle.runtime.checker.log import LAUNCH, Collective
from treadle.runtime.checker.stream_recorder import NotedEvent, StreamRecorder

_Moving: TypeAlias = tuple[Any, Callable[[], Any] | None]
"""The work of the communicator underneath, and what brings its result to where it belongs."""


class CheckedWork:
    """What a call on a communicator returns. It holds the tensors of a collective until it is waited for."""

    def __init__(self, recorder: StreamRecorder, moving: _Moving, end: NotedEvent, stash: Sequence[Tensor]) -> None:
        self._recorder, self._moving, self._end, self._stash = recorder, moving, end, stash

    def wait(self, timeout: Any = None) -> bool:
        """Lets the current stream wait for the communicator's. The host only waits for gloo to bring the numbers."""
        work, bring = self._moving
        if work is not None:
            work.wait()
            if bring is not None:
                with not_noted():
                    bring()
            self._moving = None, None
        self._recorder.current().wait_event(self._end, "Work.wait")
        self._stash = ()
        return True


class CheckedCommunicator:
    """A communicator with a stream of its own. Other methods are those of the one underneath."""

    def __init__(self, recorder: StreamRecorder, under: Any, name: str) -> None:
        self._recorder, self._under, self._name = recorder, under, name
        self._stream = recorder.new(torch.device("cpu"), f"communicator {name}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._under, name)

    def _launch(
        self, call: str, reads: Sequence[Tensor], writes: Sequence[Tensor], go: Callable[[], _Moving]
    ) -> CheckedWork:
        recorder, current = self._recorder, self._recorder.current()
        told = " ".join(f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}" for tensor in (*reads, *writes))
        recorder.collectives.append(Collective(self._name, call, told, recorder.where()))
        self._stream.wait_event(recorder.event_on(current), LAUNCH)
        read, written = ([n for n in map(recorder.storage_of, side) if n is not None] for side in (reads, writes))
        recorder.use(self._stream.number, read, written, call)
        is_message = call in ("send", "recv")
        for tensor in (*reads, *writes) if is_message else ():
            recorder.record_stream(tensor, self._stream, "the communicator")
        end = recorder.event_on(self._stream)
        with not_noted():
            moving = go()
        return CheckedWork(recorder, moving, end, () if is_message else (*reads, *writes))

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> CheckedWork:
        """Launches a send."""
        return self._launch(
            "send", tensors, [], lambda: (self._under.send([t.clone() for t in tensors], dst, tag), None)
        )

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> CheckedWork:
        """Launches a receive."""

        def go() -> _Moving:
            rooms = [torch.empty_like(tensor) for tensor in tensors]
            return self._under.recv(rooms, src, tag), lambda: _bring(tensors, rooms)

        return self._launch("recv", [], tensors, go)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> CheckedWork:
        """Launches a reduction."""

        def go() -> _Moving:
            rooms = [tensor.clone() for tensor in tensors]
            work = self._under.allreduce(rooms) if opts is None else self._under.allreduce(rooms, opts)
            return work, lambda: _bring(tensors, rooms)

        return self._launch("allreduce", tensors, tensors, go)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> CheckedWork:
        """Launches a reduce-scatter."""

        def go() -> _Moving:
            room = torch.empty_like(output)
            return self._under._reduce_scatter_base(room, input.clone(), opts), lambda: _bring([output], [room])

        return self._launch("reduce_scatter", [input], [output], go)

    def allgather(self, gathered: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> CheckedWork:
        """Launches an all-gather."""
        (into,) = gathered

        def go() -> _Moving:
            rooms = [tensor.clone() for tensor in into]
            return self._under.allgather([rooms], [t.clone() for t in tensors]), lambda: _bring(into, rooms)

        return self._launch("allgather", tensors, into, go)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> CheckedWork:
        """Launches an all-gather into one tensor."""

        def go() -> _Moving:
            room = torch.empty_like(output)
            return self._under._allgather_base(room, input.clone()), lambda: _bring([output], [room])

        return self._launch("allgather", [input], [output], go)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> CheckedWork:
        """Launches an all-to-all of rows."""

        def go() -> _Moving:
            room = torch.empty_like(output)
            work = self._under.alltoall_base(room, input.clone(), output_splits, input_splits)
            return work, lambda: _bring([output], [room])

        return self._launch("alltoall", [input], [output], go)


class CheckedStreams(StreamRecorder):
    """The recorder as the runtime asks for it (`treadle.dist.streams.Streams`): its communicators are recorded too."""

    def communicator(self, made: Any, name: str) -> CheckedCommunicator:
        """Gives a communicator a stream of its own, as NCCL has."""
        return CheckedCommunicator(self, made, name)


def _bring(tensors: Sequence[Tensor], rooms: Sequence[Tensor]) -> None:
    for tensor, room in zip(tensors, rooms, strict=True):
        tensor.copy_(room)
