"""What the stream checker finds, told so that a reader finds the line to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from treadle.runtime.checker.log import Collective


class FindingKind(Enum):
    """The kinds of findings, each with its way out."""

    READ_TOO_EARLY = "a tensor is read before the write of another stream is done"
    WRITTEN_TOO_EARLY = "a tensor is written while another stream still reads it"
    WRITTEN_TWICE = "two streams write a tensor in no order"
    REUSED = "memory is given to another tensor while a stream still uses it"
    NOT_KEPT = "memory is given back while another stream still uses it"
    OTHER_STREAM = "autograd runs a node on the stream of its forward, which is not that of this backward"
    ON_HOST = "a kernel of the device is given a tensor of the host"
    OTHER_ORDER = "ranks call the same communicators in different orders"


_KEEP = "call treadle.dist.streams.keep(tensor) on the stream that uses it, or hold the tensor longer"
_WAY_OUT = {
    FindingKind.READ_TOO_EARLY: "let the second stream wait for an event after the first",
    FindingKind.WRITTEN_TOO_EARLY: "let the second stream wait for an event after the first",
    FindingKind.WRITTEN_TWICE: "let the second stream wait for an event after the first",
    FindingKind.REUSED: _KEEP,
    FindingKind.NOT_KEPT: _KEEP,
    FindingKind.OTHER_STREAM: "run a backward on the lane of its forward",
    FindingKind.ON_HOST: "make the tensor with device=, or upload it (treadle.dist.streams.upload)",
    FindingKind.OTHER_ORDER: "call them in one order on all ranks, whatever the data are",
}


@dataclass
class StreamFinding:
    """One place that is wrong, and how often it was met."""

    kind: FindingKind
    tensor: str = ""
    first: str = ""
    second: str = ""
    freed: str = ""
    times: int = 1
    rank: int | None = None

    def __str__(self) -> str:
        who = f"rank {self.rank}: " if self.rank is not None else ""
        often = f" ({self.times} times)" if self.times > 1 else ""
        lines = [f"{who}{self.kind.value}{often}"]
        lines += [f"  {name:<8}{told}" for name, told in self._parts() if told]
        lines.append(f"  way out {_WAY_OUT[self.kind]}")
        return "\n".join(lines)

    def _parts(self) -> tuple[tuple[str, str], ...]:
        return ("what", self.tensor), ("first", self.first), ("let go", self.freed), ("then", self.second)


def order_findings(by_rank: Mapping[int, Sequence[Collective]]) -> list[StreamFinding]:
    """Compares what ranks called on the communicators that they share.

    The k-th call on a communicator has the same name on all its ranks, and a receive as many numbers as its send. Two
    ranks that share several groups come to the collectives of all of them in one order: each such kernel holds a part
    of the device until its peers are there.

    Args:
        by_rank: for each rank its calls, in the order in which it launched them.

    Returns:
        A finding for the first difference between any two ranks.

    """
    found = []
    ranks = sorted(by_rank)
    for at, one in enumerate(ranks):
        for other in ranks[at + 1 :]:
            shared = {c.communicator for c in by_rank[one]} & {c.communicator for c in by_rank[other]}
            mine, theirs = ([c for c in by_rank[rank] if c.communicator in shared] for rank in (one, other))
            finding = _messages(mine, theirs, one, other) or _collectives(mine, theirs, one, other)
            if finding is not None:
                found.append(finding)
    return found


def _collectives(mine: list[Collective], theirs: list[Collective], one: int, other: int) -> StreamFinding | None:
    mine, theirs = ([c for c in calls if c.call not in ("send", "recv")] for calls in (mine, theirs))
    for number in range(max(len(mine), len(theirs))):
        ours = mine[number] if number < len(mine) else None
        others = theirs[number] if number < len(theirs) else None
        if ours is None or others is None or _name(ours) != _name(others):
            return _differ(number, ours, others, one, other)
    return None


def _messages(mine: list[Collective], theirs: list[Collective], one: int, other: int) -> StreamFinding | None:
    """The k-th send of a channel meets the k-th receive."""
    for communicator in dict.fromkeys(c.communicator for c in mine if c.call in ("send", "recv")):
        pairs = zip(*([c for c in calls if c.communicator == communicator] for calls in (mine, theirs)), strict=False)
        for number, (ours, others) in enumerate(pairs):
            if {ours.call, others.call} != {"send", "recv"} or ours.told != others.told:
                return _differ(number, ours, others, one, other)
    return None


def _name(call: Collective) -> tuple[str, ...]:
    sized = (call.told,) if call.call in ("allreduce", "allgather") else ()  # parts of an all-to-all differ in size
    return call.communicator, call.call, *sized


def _differ(number: int, ours: Collective | None, others: Collective | None, one: int, other: int) -> StreamFinding:
    def told(call: Collective | None, rank: int) -> str:
        if call is None:
            return f"rank {rank} makes no such call"
        return f"rank {rank} calls {call.call} of {call.told} on {call.communicator} {call.where}"

    return StreamFinding(
        FindingKind.OTHER_ORDER, tensor=f"call {number}", first=told(ours, one), second=told(others, other), rank=one
    )
