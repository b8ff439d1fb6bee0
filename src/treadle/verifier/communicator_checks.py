"""T207: what an order of issue does on communicators that channels share, as findings."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.ir.program import Program
from treadle.passes.issue_order import IssueOrder
from treadle.verifier.communicator_queues import Communicators, Creation, Judgement, judge, out_of_turn
from treadle.verifier.finding import MOST, Finding

SHARED: dict[Communicators, str] = {
    "channel": "a communicator for each channel",
    "direction": "a communicator for each direction of the pipe",
    "pair": "a communicator for each pair of ranks",
    "group": "one communicator for all ranks",
}
_CREATED: dict[Creation, str] = {
    "before": "",
    "lazy": ", made at its first message",
    "lazy-device": ", made at its first message, which waits for the device",
}
_WHEN = {"large": "when messages are larger than the backend's buffer", "always": "always"}


def check_queues(
    program: Program, order: IssueOrder, communicators: Communicators, *, lazy: bool = False
) -> Iterator[Finding]:
    """T103, T207, and T204 where directions are apart: what happens when each rank issues its ops in this order."""
    late = out_of_turn(program, order)
    for op, wanted in late[:MOST]:
        reader, maker = program.op(op), program.op(wanted)
        yield Finding.at("T103", reader, f"{reader} is issued before {maker}, which it needs")
    if late:
        return
    verdict, found = judge_in_turn(program, order, communicators, lazy=lazy)
    yield from _crossings(program, verdict)
    if verdict.hangs != "never":
        where = f"{SHARED[communicators]}{_CREATED[found]}"
        yield _hang(program, verdict, where, _way_out(program, order, verdict, found))


def judge_in_turn(
    program: Program, order: IssueOrder, communicators: Communicators, *, lazy: bool
) -> tuple[Judgement, Creation]:
    """Judge with communicators that are made before the step, then lazily; return the first hang, else the last."""
    found: Creation = "before"
    verdict = judge(program, order, communicators)
    for creation in ("lazy", "lazy-device") if lazy else ():
        if verdict.hangs == "never":
            found, verdict = creation, judge(program, order, communicators, creation=creation)
    return verdict, found


def _hang(program: Program, verdict: Judgement, where: str, way_out: str) -> Finding:
    steps = tuple(wait.words for wait in verdict.circle)
    circle = f"{len(steps)} ops wait for each other in a circle" if len(steps) > 1 else "an op has no partner"
    shown = program.op(verdict.circle[0].waiting)
    return Finding.at("T207", shown, f"hangs with {where}, {_WHEN[verdict.hangs]}: {circle}{way_out}", steps)


def _way_out(program: Program, order: IssueOrder, verdict: Judgement, found: Creation) -> str:
    """What else this order ends with."""
    if len(verdict.unmatched):
        return ""
    if found != "before":
        return f"; it ends with {SHARED[verdict.communicators]} that is made before the step"
    layouts: tuple[Communicators, ...] = ("direction", "channel")
    for layout in layouts:
        if layout != verdict.communicators and judge(program, order, layout).ends:
            return f"; it ends with {SHARED[layout]}"
    return ""


def _crossings(program: Program, verdict: Judgement) -> Iterator[Finding]:
    """T204 where channels are split by direction; elsewhere a crossing is one of the channel."""
    for sent, received in verdict.crossed[:MOST] if verdict.communicators == "direction" else ():
        send, receive = program.op(sent), program.op(received)
        message = (
            f"{receive.label} is filled with {send.label} of rank {send.lane.rank}, on one direction's communicator"
        )
        yield Finding.at("T204", receive, message)
