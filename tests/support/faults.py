"""Faults as sentences, injected through the handlers of ops.

    faults = Faults(directory).kill(rank=2, before="F3.1", step=1)
    faults.arm(rank)                    # in the process of each rank, before its Pipeline is made

An op goes by `str(op)` with its pipeline's own ranks: "F3.1", "receive F3.1 from rank 0", "attn_f 0.1 L0". An op of a
message or a reduction has several calls (`treadle.runtime.run.handlers.OpCalls`, and `drain` behind the last send of a
channel); `call` says at which of them the fault happens. Steps count from 0. A real fault happens in a real process: it
is killed, stopped, asleep for good, or raises.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

from tests.support.patience import PATIENT_S
from tests.support.ranks import Outcome
from treadle import sim_device
from treadle.host.pressure import short_of_cores
from treadle.ir.program import Op
from treadle.runtime import step_report
from treadle.runtime.run.handlers import HANDLERS, Call, Handler, OpCalls
from treadle.runtime.run.rank_program import RankProgram

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")

CallName = Literal["prepare", "launch", "finish", "drain"]
AGREEMENT = "the agreement on the loss"

HANGS = ("stop", "sleep", "kernel")
DEADLINES_S = (1.5, 4.0, 10.0, 30.0)
"""Deadlines for hangs. The next is tried where a machine is too busy to get as far as the fault."""
PRESSED_S = 10.0
"""The least deadline where processes wait for cores."""


@dataclass(frozen=True)
class Fault:
    """`kind` happens to `rank` before or after a call of an op, in one step."""

    kind: str | Callable[[], None]
    rank: int
    op: str
    step: int
    after: bool
    call: CallName


class Faults:
    """The faults of one case. The time of each is left in `directory / f"fault{rank}"`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._listed: list[Fault] = []

    def add(
        self,
        kind: str | Callable[[], None],
        *,
        rank: int,
        step: int,
        before: str = "",
        after: str = "",
        call: CallName = "launch",
    ) -> Faults:
        """Add a fault: kill, stop, sleep, raise or kernel, or a call of the test's own that does one of these.

        A kernel hangs the device of threads; the host goes on.
        """
        assert bool(before) != bool(after), "a fault is before an op or after one"
        self._listed.append(Fault(kind, rank, before or after, step, bool(after), call))
        return self

    kill = partialmethod(add, "kill")
    """SIGKILL."""
    stop = partialmethod(add, "stop")
    """SIGSTOP."""
    sleep = partialmethod(add, "sleep")
    """The thread sleeps for good; the rest of the process goes on."""
    fail = partialmethod(add, "raise")
    """ValueError."""

    def arm(self, rank: int) -> None:
        """Wrap this process's handlers of ops that a fault of this rank names."""
        for fault in self._listed:
            if fault.rank != rank:
                continue
            if fault.op == AGREEMENT:
                step_report.agree = self._faulty(fault, step_report.agree)
                continue
            for kind, handler in list(HANDLERS.items()):
                HANDLERS[kind] = self._with_fault(fault, handler)

    def _with_fault(self, fault: Fault, handler: Handler) -> Handler:
        def handle(part: RankProgram, op: Op) -> OpCalls:
            calls = handler(part, op)
            if str(op) != fault.op:
                return calls
            if fault.call == "drain":
                channel = part.outgoing[op.lane.peer]
                channel.drain = self._faulty(fault, channel.drain)  # type: ignore[method-assign]
                return calls
            run: Call | None = getattr(calls, fault.call)
            assert run is not None, f"{op} has no call {fault.call}"
            return calls._replace(**{fault.call: self._faulty(fault, run)})

        return handle

    def _faulty(self, fault: Fault, run: Callable[P, T]) -> Callable[P, T]:
        calls = iter(range(1_000_000))

        def faulty(*args: P.args, **kwargs: P.kwargs) -> T:
            is_now = next(calls) == fault.step
            if is_now and not fault.after:
                self._happen(fault)
            value = run(*args, **kwargs)
            if is_now and fault.after:
                self._happen(fault)
            return value

        return faulty

    def _happen(self, fault: Fault) -> None:
        if callable(fault.kind):
            fault.kind()
        else:
            meet_with(fault.kind, fault.rank, self.directory)


def note(directory: Path, rank: int, what: str, text: str) -> None:
    """Leave a text of a rank for the test."""
    (directory / f"{what}{rank}").write_text(text)


def meet_with(kind: str, rank: int, directory: Path) -> None:
    """Let a fault happen to this process, now."""
    note(directory, rank, "fault", str(time.monotonic()))
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1e6)  # another thread may be the one that is told to stop them all, a moment later
        case "sleep":
            time.sleep(1e6)
        case "kernel":
            sim_device.sleep(-1)
        case "raise":
            raise ValueError("bad batch")


def hold_to(
    fault: Path,
    deadlines_s: Sequence[float],
    run: Callable[[float], list[Outcome[T]]],
    judge: Callable[[list[Outcome[T]], float], V],
) -> V:
    """Return what `judge` makes of ranks that ran under the first of the deadlines that the machine lets them keep.

    On a host that is short of cores, where one that waits for a core for longer than a short deadline is lost by right,
    short ones are passed over. The next is tried if nobody got as far as the fault, which leaves the file `fault`.
    Ranks that met it are judged once.
    """
    least_s = PRESSED_S if short_of_cores() else 0.0
    for deadline_s in (each for each in deadlines_s if each >= least_s):
        outcomes = run(deadline_s)
        if fault.exists():
            return judge(outcomes, deadline_s)
    told = "\n".join(map(str, outcomes))
    raise AssertionError(f"nobody got as far as the fault within {deadline_s:g} s:\n{told}")


def deadlines_for(fault: str, least_s: float = 0.0) -> list[float]:
    """Return short deadlines for hangs, which only they end, and a long one for faults that nobody may need it for."""
    return [deadline_s for deadline_s in DEADLINES_S if deadline_s >= least_s] if fault in HANGS else [PATIENT_S]
