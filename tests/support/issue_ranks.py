"""Runs orders of issue on real processes: a thread for each stream of each rank, gloo for the messages.

What each rank does was written from "Shared communicators" of docs/reference/semantics.md alone (`issue_rules.py` has
the scripts). The k-th send on a communicator meets the k-th receive because gloo keeps the order of messages of one
tag, and a communicator has a tag. A large send waits for an answer that its receive gives when it starts. So a step
that hangs does hang: threads wait for messages that nobody sends.

That it hangs is found without a clock. In each wave all ranks, once none of their threads is at work, add up how many
messages each line has carried, which message each waiting thread waits for, and how often threads have worked. If two
waves in a row give the same, and no thread waits for a message that was sent, then nothing moved between them and
nothing can move any more. What was not sent is then sent as void, so that every thread ends and ranks go on with the
next order.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from random import Random
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from tests.support.issue_rules import Creation, Fate, Key, Plan, Unit
from tests.support.patience import HUNG_S
from treadle.ir import Action, Kind

VOID = -1

Line: TypeAlias = tuple[int, int, int]
"""Messages of one tag from one rank to another, in order."""


class Run(NamedTuple):
    """A plan and how it is run. `seed` is that of the delays."""

    plan: Plan
    eager: bool
    creation: Creation
    seed: int


class VoidError(Exception):
    """The run hangs, and has been given up."""


class Activity:
    """How many threads of this rank are at work, and what the others wait for."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.busy = 0
        self.steps = 0
        """How often a thread has gone to work."""
        self.over = False
        self.sent: dict[Line, int] = defaultdict(int)
        self.posted: dict[Line, int] = defaultdict(int)
        self.awaited: dict[Line, int] = defaultdict(int)
        """Which message of a line a thread waits for, from 1; 0 for none."""
        self.gates: list[Gate] = []

    def begin(self, num: int = 1) -> None:
        """Some more threads work. The lock is held."""
        self.busy += num
        self.steps += num

    def rest(self) -> None:
        """A thread works no more. The lock is held."""
        self.busy -= 1
        if not self.busy:
            self.lock.notify_all()

    def wait_idle(self) -> None:
        """Wait until no thread works."""
        with self.lock:
            assert self.lock.wait_for(lambda: not self.busy, HUNG_S), "a thread does not come to rest"

    def give_up(self) -> None:
        """End all waits within the rank."""
        with self.lock:
            self.over = True
            for gate in self.gates:
                gate.let_go()


class Gate:
    """What has ended or not. Threads wait for it; that they are woken counts as work from then on."""

    def __init__(self, activity: Activity) -> None:
        self.activity, self.is_open = activity, False
        self._waiting: list[threading.Lock] = []
        activity.gates.append(self)

    def open(self) -> None:
        """It has ended."""
        with self.activity.lock:
            self.is_open = True
            self.let_go()

    def let_go(self) -> None:
        """Wake all that wait. The lock is held."""
        self.activity.begin(len(self._waiting))
        for lock in self._waiting:
            lock.release()
        self._waiting.clear()

    def wait(self) -> None:
        """Wait until it has ended, or the run is given up."""
        with self.activity.lock:
            if self.activity.over:
                raise VoidError
            if self.is_open:
                return
            lock = threading.Lock()
            lock.acquire()
            self._waiting.append(lock)
            self.activity.rest()
        lock.acquire()
        if not self.is_open:
            raise VoidError


class Wires:
    """This rank's messages: numbers on lines, by gloo."""

    def __init__(self, rank: int, activity: Activity) -> None:
        self.rank, self.activity = rank, activity
        group = dist.group.WORLD
        assert group is not None
        self.group = group
        self._leaving: list[tuple[dist.Work, torch.Tensor]] = []

    def send(self, peer: int, tag: int, number: int) -> None:
        """Launch a message. Nobody waits for it."""
        tensor = torch.tensor([number])
        with self.activity.lock:
            self.activity.sent[self.rank, peer, tag] += 1
            work = self.group.send([tensor], peer, tag)
            self._leaving.append((work, tensor))

    def post(self, peer: int, tag: int) -> Callable[[], int]:
        """Launch a receive; return what waits for it and returns its number."""
        line, tensor = (peer, self.rank, tag), torch.zeros(1, dtype=torch.int64)
        with self.activity.lock:
            self.activity.posted[line] += 1
            place = self.activity.posted[line]
            work = self.group.recv([tensor], peer, tag)

        def wait() -> int:
            with self.activity.lock:
                self.activity.awaited[line] = place
                self.activity.rest()
            work.wait()
            with self.activity.lock:
                self.activity.awaited[line] = 0
                self.activity.begin()
            return int(tensor)

        return wait

    def drain(self) -> None:
        """Wait until all messages have left."""
        for work, _ in self._leaving:
            work.wait()
        self._leaving.clear()


class Stream:
    """A thread that does jobs in order. It serves all runs."""

    def __init__(self, name: str) -> None:
        self._jobs: deque[tuple[Activity, Callable[[], None]]] = deque()
        self.is_awake = False
        self._calls: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, activity: Activity, job: Callable[[], None]) -> None:
        """Do this when all before it is done."""
        with activity.lock:
            self._jobs.append((activity, job))
            if not self.is_awake:
                self.is_awake = True
                activity.begin()
                self._calls.put(True)

    def _serve(self) -> None:
        while self._calls.get():
            while self.is_awake:
                activity, job = self._jobs.popleft()
                if not activity.over:
                    with suppress(VoidError):
                        job()
                with activity.lock:
                    if not self._jobs:
                        self.is_awake = False
                        activity.rest()

    def close(self) -> None:
        """End the thread."""
        self._calls.put(False)
        self._thread.join()


class Streams(dict[Key, Stream]):
    """The streams of a rank, made at their first use."""

    def __missing__(self, key: Key) -> Stream:
        self[key] = Stream(str(key))
        return self[key]

    def wait_asleep(self, activity: Activity) -> None:
        """Wait until no stream has a job: one that is void counts until its thread has dropped it."""
        with activity.lock:
            asleep = activity.lock.wait_for(lambda: not any(stream.is_awake for stream in self.values()), HUNG_S)
            assert asleep, "a thread does not come to its end"

    def close(self) -> None:
        """End their threads."""
        for stream in self.values():
            stream.close()


HOST: Key = ("host", 0, 0)
COMPUTE: Key = ("compute", 0, 0)


class RankRun:
    """One rank's part of a run."""

    def __init__(self, rank: int, run: Run, streams: Streams) -> None:
        self.rank, self.run, self.streams = rank, run, streams
        self.activity = Activity()
        self.wires = Wires(rank, self.activity)
        self.script = run.plan.scripts[rank]
        self.ended = [Gate(self.activity) for _ in self.script]
        self.members = run.plan.members
        self.number = {key: at for at, key in enumerate(self.members)}
        self.lines = self._lines()
        self.crossed: list[tuple[int, Action, Action]] = []
        self._random = Random(run.seed * 64 + rank)
        self._delays = [self._random.random() * 0.001 if self._random.random() < 0.1 else 0.0 for _ in self.script]

    def _lines(self) -> dict[Line, int]:
        """How many messages each line carries if nothing hangs, or is filled with void: a tag each for a communicator's
        messages, for the answers to them, and for its creation."""
        found: dict[Line, int] = {}
        ranks = range(len(self.run.plan.scripts))
        for src in ranks:
            for dst in ranks:
                if src == dst:
                    continue
                for key, (sent, received) in self.run.plan.numbers(src, dst).items():
                    found[src, dst, self._tag(key, 0)] = max(sent, received)
                    if not self.run.eager:
                        found[dst, src, self._tag(key, 1)] = max(sent, received)
        if self.run.creation != "before":
            for key, members in self.members.items():
                found |= {(src, dst, self._tag(key, 2)): 1 for src in members for dst in members if src != dst}
        return found

    def _tag(self, key: Key, what: int) -> int:
        return 3 * self.number[key] + what

    def execute(self) -> bool:
        """Run to the end, or until nothing moves; returns whether anything is left."""
        self.streams[HOST].put(self.activity, self._issue_all)
        hangs = self._wait_for_all()
        if hangs:
            self._give_up()
        self.wires.drain()
        return hangs

    def _wait_for_all(self) -> bool:
        """Waves until two in a row show that nothing moves; returns whether a unit of any rank has not ended."""
        lines, before = list(self.lines), None
        while True:
            self.activity.wait_idle()
            with self.activity.lock:
                left = sum(not gate.is_open for gate in self.ended)
                sent = [self.activity.sent[line] for line in lines]
                awaited = [self.activity.awaited[line] for line in lines]
                wave = torch.tensor([self.activity.busy, self.activity.steps, left, *sent, *awaited])
            dist.all_reduce(wave)
            now: list[int] = wave.tolist()
            arrived, waited = now[3 : 3 + len(lines)], now[3 + len(lines) :]
            is_still = now[0] == 0 and all(not w or w > a for a, w in zip(arrived, waited, strict=True))
            if is_still and now == before:
                return now[2] > 0
            before = now

    def _give_up(self) -> None:
        self.activity.give_up()
        dist.barrier()  # no void message comes to a rank that would go on
        for line, total in self.lines.items():
            if line[0] == self.rank:
                for _ in range(total - self.activity.sent[line]):
                    self.wires.send(line[1], line[2], VOID)
        self.streams.wait_asleep(self.activity)
        with self.activity.lock:
            self.activity.begin()  # this thread, which receives what is left
        for line, total in self.lines.items():
            if line[1] == self.rank:
                for _ in range(total - self.activity.posted[line]):
                    self.wires.post(line[0], line[2])()

    # -- what a host and its streams do ------------------------------------------------------------------------------

    def _issue_all(self) -> None:
        last_compute: Gate | None = None
        made: set[Key] = set()
        for number, unit in enumerate(self.script):
            for key in unit.communicators if self.run.creation != "before" else ():
                if key not in made:
                    self._create(key, number)
                    made.add(key)
            if unit.on_compute_stream:
                self.streams[COMPUTE].put(self.activity, self._compute(number, unit))
                last_compute = self.ended[number]
            else:
                self._launch(number, unit, last_compute)

    def _create(self, key: Key, number: int) -> None:
        if self.run.creation == "lazy-device":
            for gate in self.ended[:number]:
                gate.wait()
        others = [member for member in self.members[key] if member != self.rank]
        for peer in others:
            self.wires.send(peer, self._tag(key, 2), 0)
        _wait_for([self.wires.post(peer, self._tag(key, 2)) for peer in others])

    def _compute(self, number: int, unit: Unit) -> Callable[[], None]:
        def compute() -> None:
            for need in unit.needs:
                (self.ended[need] if need is not None else Gate(self.activity)).wait()
            time.sleep(self._delays[number])
            self.ended[number].open()

        return compute

    def _launch(self, number: int, unit: Unit, after: Gate | None) -> None:
        """Put a batch on each of its streams: the last that comes to it does it, the others wait for its end."""
        missing = [len(unit.communicators)]

        def come() -> None:
            with self.activity.lock:
                missing[0] -= 1
                is_last = not missing[0]
            if not is_last:
                self.ended[number].wait()
                return
            if after is not None:
                after.wait()
            time.sleep(self._delays[number])
            self._exchange(unit)
            self.ended[number].open()

        for stream in unit.communicators:
            self.streams[stream].put(self.activity, come)

    def _exchange(self, unit: Unit) -> None:
        """Do the messages of a batch: start all, then wait for what they wait for."""
        waits: list[Callable[[], int]] = []
        receives: list[tuple[Action, Callable[[], int]]] = []
        for message in unit.messages:
            data, answer = (self._tag(message.communicator, what) for what in (0, 1))
            if message.is_send:
                self.wires.send(message.peer, data, _number(message.name))
                if not self.run.eager:
                    waits.append(self.wires.post(message.peer, answer))
            else:
                receives.append((message.name, self.wires.post(message.peer, data)))
                if not self.run.eager:
                    self.wires.send(message.peer, answer, 0)
        got = _wait_for([wait for _, wait in receives] + waits)
        for (name, _), number in zip(receives, got, strict=False):
            if number != _number(name):
                self.crossed.append((self.rank, name, _name(number)))


def _wait_for(waits: Iterable[Callable[[], int]]) -> list[int]:
    got = [wait() for wait in waits]
    if VOID in got:
        raise VoidError
    return got


def _number(name: Action) -> int:
    return (name.mb * 64 + name.chunk) * 2 + (name.kind == Kind.B)


def _name(number: int) -> Action:
    return Action(Kind.B if number % 2 else Kind.F, number // 128, number // 2 % 64)


def run_all(rank: int, runs: Sequence[Run]) -> list[tuple[bool, list[tuple[int, Action, Action]]]]:
    """A rank's part of all runs: for each, did any rank hang, and which receives of this rank got another message."""
    streams, found = Streams(), []
    try:
        for run in runs:
            part = RankRun(rank, run, streams)
            hangs = part.execute()
            found.append((hangs, part.crossed))
    finally:
        streams.close()
    return found


def fates(plans: Sequence[Run], results: Sequence[list[tuple[bool, list[tuple[int, Action, Action]]]]]) -> list[Fate]:
    """Put what the ranks found together. A send that nobody receives never ends, though it leaves its rank."""
    found = []
    for at, run in enumerate(plans):
        hangs = {rank[at][0] for rank in results}
        assert len(hangs) == 1, "ranks see one run as one"
        crossed = frozenset(cross for rank in results for cross in rank[at][1])
        found.append(Fate(hangs.pop() + run.plan.num_alone, crossed))
    return found
