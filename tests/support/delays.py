"""Pauses threads at lines and bytecodes of chosen packages, from a seed, without a hook in their code.

    delays = Delays([Path(treadle.runtime.__file__).parent])
    delays.install()                # before the threads start that are to be paused
    with delays.armed("7/rank 0"):  # one step; the same seed pauses the same places
        pipe.step(...)

A trace function sees every call, and stops some of them before one of their bytecodes, as a switch of threads would.
What is chosen are functions as some thread calls them, rare ones as often as frequent ones, and those more often that
several threads call, or where ranks meet. Five manners take turns: pauses scattered over all functions; many in a few
functions; many in a few modules, in whatever thread; many in what a thread calls seldom and another all the time; one
thread in three so slow that the others run far ahead. A thread draws from a generator of its own, so what it draws does
not depend on when the others come.

Uses `sys.settrace`: `sys.monitoring` would cost less, and came with Python 3.12. Calls of other code cost a lookup
each, and lines are not traced: that would double the time of a step.
"""

from __future__ import annotations

import dis
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

SHORTEST_S, LONGEST_S = 0.001, 0.020
MOST_PAUSES = 25
"""Of a thread in a step."""

FIRST_CHANCE = 0.01
"""Of a call to be paused, before a step has shown what is called."""

SCATTERED_PAUSES, FUNCTION_PAUSES, MODULE_PAUSES, SLOW_PAUSES = 8.0, 8.0, 12.0, 30.0
"""Of a thread over whose functions they are scattered; of a chosen function; of a thread in a chosen module; of a slow
thread."""

MEETING = re.compile(
    r"(channel|groups|gradients|split|segments|executor|exchange|chunk|thread|store|pool|all_to_all)\.py$"
)
MEETING_NAME = re.compile(r"send|recv|receive|post|wait|arrive|swap|drain|launch|reduce|await|put|take")
"""Modules and functions that several threads or ranks come to at once."""

MEETING_WEIGHT, SHARED_WEIGHT = 2.0, 4.0
"""What such a function weighs more than others, and one that several threads were seen to call."""

SELDOM, HOME_PAUSES = 8, 20.0
"""A thread is a stranger to a function that another calls so much more often: it was written for the other. In three of
them each of its calls is paused, and so many of the other's, in two that strangers come to."""

MODULE_WEIGHT = 4.0
"""Of a module in which threads or ranks meet."""


SWITCH_S = (5e-3, 5e-3, 5e-4)
"""How long the interpreter lets a thread run; the first is Python's own."""


class Manner(Enum):
    """How a step is disturbed."""

    SCATTERED = "scattered"
    FUNCTIONS = "functions"
    MODULES = "modules"
    STRANGERS = "strangers"
    SLOW_THREAD = "slow thread"


OFTEN = {
    Manner.SCATTERED: 15,
    Manner.FUNCTIONS: 10,
    Manner.MODULES: 20,
    Manner.STRANGERS: 40,
    Manner.SLOW_THREAD: 15,
}
"""How many of a hundred steps are disturbed in each manner."""


@dataclass(frozen=True, eq=False)
class Function:
    """Code, and its length in bytecodes: 0 where it is none of ours. A code's own hash is over all its constants."""

    code: CodeType
    length: int


Visits = dict[str, dict[Function, int]]
"""How often each thread, by its name, called each function in a step."""


class _Thread:
    """One thread in one step: what it draws from, and by what chance a call of each function is paused."""

    def __init__(self, rng: Random, chances: dict[Function, float], first: float) -> None:
        self.rng, self.chances, self.first = rng, chances, first
        self.visits: dict[Function, int] = {}
        self.pauses_left = MOST_PAUSES

    def is_chosen(self, function: Function) -> bool:
        """Is this call one to be paused."""
        self.visits[function] = self.visits.get(function, 0) + 1
        chance = self.chances.get(function, self.first)
        return chance > 0.0 and self.rng.random() < chance and self.pauses_left > 0

    def pause(self) -> None:
        """Sleeps, unless it has done so often enough."""
        if self.pauses_left > 0:
            self.pauses_left -= 1
            time.sleep(self.rng.uniform(SHORTEST_S, LONGEST_S))


class _Turn:
    """One step of a rank, after one in which it made these visits."""

    def __init__(self, seed: str, visits: Visits) -> None:
        self.seed, self.visits, rng = seed, visits, Random(seed)
        self.manner = rng.choices(list(OFTEN), list(OFTEN.values()))[0]
        self.switch_s = rng.choice(SWITCH_S)
        self._callers = Counter(code for of_thread in visits.values() for code in of_thread)
        self._most = {code: max(v.get(code, 0) for v in visits.values()) for code in self._callers}
        self._visited = {c for seen in visits.values() for c in seen if seen[c] * SELDOM <= self._most[c]}
        self._functions: list[tuple[str, Function]] = []
        self._files: set[str] = set()
        if self.manner is Manner.FUNCTIONS and visits:
            pairs = sorted(((name, code) for name in visits for code in visits[name]), key=_place)
            self._functions = rng.choices(pairs, [self._weight(code) for _, code in pairs], k=rng.randint(2, 16))
        if self.manner is Manner.MODULES and visits:
            files = sorted({function.code.co_filename for function in self._callers})
            weights = [MODULE_WEIGHT if MEETING.search(file) else 1.0 for file in files]
            self._files = set(rng.choices(files, weights, k=rng.randint(1, 3)))
        self.threads: dict[int, _Thread] = {}

    def thread(self) -> _Thread:
        """The calling thread's."""
        known = self.threads.get(threading.get_ident())
        if known is None:
            known = self.threads[threading.get_ident()] = self._make(threading.current_thread().name)
        return known

    def _make(self, name: str) -> _Thread:
        rng, seen = Random(f"{self.seed}/{name}"), self.visits.get(name, {})
        if self._functions:
            mine = {code for thread, code in self._functions if thread == name}
            return _Thread(rng, {code: FUNCTION_PAUSES / seen[code] for code in mine}, 0.0)
        if self.manner is Manner.STRANGERS and self.visits:
            strange = [code for code in seen if seen[code] * SELDOM <= self._most[code]]
            home = [code for code in seen if code in self._visited and code not in strange]
            home = rng.sample(home, min(len(home), 2))
            chances = {code: HOME_PAUSES / len(home) / seen[code] for code in home}
            return _Thread(rng, chances | dict.fromkeys(rng.sample(strange, min(len(strange), 3)), 1.0), 0.0)
        if self._files:
            within = [function for function in seen if function.code.co_filename in self._files]
            return _Thread(rng, {each: MODULE_PAUSES / len(within) / seen[each] for each in within}, 0.0)
        pauses = SCATTERED_PAUSES
        if self.manner is Manner.SLOW_THREAD:
            pauses = SLOW_PAUSES if rng.random() < 1 / 3 else 0.0
        weights = {code: self._weight(code) for code in seen}
        whole = sum(weights.values())
        chances = {code: pauses * weights[code] / whole / seen[code] for code in seen}
        return _Thread(rng, chances, FIRST_CHANCE if pauses else 0.0)

    def _weight(self, function: Function) -> float:
        meets = MEETING.search(function.code.co_filename) or MEETING_NAME.search(function.code.co_name)
        return (MEETING_WEIGHT if meets else 1.0) * (SHARED_WEIGHT if self._callers[function] > 1 else 1.0)


def _place(pair: tuple[str, Function]) -> tuple[str, str, int, str]:
    name, code = pair[0], pair[1].code
    return name, code.co_filename, code.co_firstlineno, code.co_qualname


class Delays:
    """Pauses the threads of this process in code below `roots`, while it is armed."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = tuple(f"{root}/" for root in roots)
        self._known: dict[int, Function] = {}
        self._visits: Visits = {}
        self._turn: _Turn | None = None

    def install(self) -> None:
        """From here on this thread, and those that start later, can be paused."""
        threading.settrace(self._call)
        sys.settrace(self._call)

    def remove(self) -> None:
        """This thread and new ones are left alone."""
        sys.settrace(None)
        threading.settrace(None)

    @contextmanager
    def armed(self, seed: str) -> Iterator[None]:
        """Pauses, drawn from the seed and from what was called in the step before."""
        turn, before = _Turn(seed, self._visits), sys.getswitchinterval()
        sys.setswitchinterval(turn.switch_s)
        self._turn = turn
        try:
            yield
        finally:
            self._turn = None
            sys.setswitchinterval(before)
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            self._visits = {names[i]: dict(t.visits) for i, t in list(turn.threads.items()) if i in names}

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        turn = self._turn
        if turn is None:
            return None
        code = frame.f_code
        function = self._known.get(id(code))
        if function is None:
            function = self._known[id(code)] = Function(code, self._length(code))
        if not function.length:
            return None
        thread = turn.thread()
        if not thread.is_chosen(function):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return _Visit(thread, thread.rng.randrange(function.length)).trace

    def _length(self, code: CodeType) -> int:
        """In bytecodes; 0 where it is none of ours."""
        return sum(1 for _ in dis.get_instructions(code)) if code.co_filename.startswith(self._roots) else 0


class _Visit:
    """One call of a function, paused once, before the `left`-th bytecode that it comes to."""

    def __init__(self, thread: _Thread, left: int) -> None:
        self._thread, self._left = thread, left

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """As the interpreter comes to a bytecode. What ends before is paused at its end."""
        if event == "opcode":
            self._left -= 1
        if self._left >= 0 and event != "return":
            return self.trace
        frame.f_trace_opcodes = False
        self._thread.pause()
        return None
