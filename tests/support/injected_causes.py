"""Runs with one injected cause each, executed by an event simulation of this file and written as trainers write them.

A worker runs the cells of its row in order: an op starts when the worker is free, and its message has come. Messages
are sent at once. At the end of a step all workers wait for each other, as for the norm of the gradients.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import treadle
from treadle.diagnosis import analyse
from treadle.ir import Action, Schedule
from treadle.ir.action import Kind
from treadle.profiles.importing import import_profile

FORMS = ("torch on CPU", "torch on a device", "NDTimeline", "Primus")
SIZES = ((4, 1), (4, 4), (32, 1), (16, 4))
"""Pipeline ranks and replicas: 16 GPUs with TP 4 and 1, 512 with TP 8, the first of them with CP 2 as well."""
HELD_OUT = (101, 102, 103)
"""Seeds on which no threshold of `treadle why` was tuned; each has a magnitude of its own."""
SMALL = 0.06
"""A cause that costs less of a step need not be named."""
CAUSES = (
    "none",
    "slow rank",
    "slow stage",
    "slow link",
    "slow link in all replicas",
    "gaps of one rank",
    "loader on one rank",
    "loader on all ranks",
    "unequal data",
    "one slow step",
    "pauses",
    "clocks within a replica",
    "clocks between replicas",
    "missing rank",
    "duplicated events",
)
_NO_TIME = ("clocks", "missing", "duplicated")
NUM_STEPS = 6
SLOW_STEP = 3
_FORWARD_MS, _MESSAGE_MS, _BETWEEN_MS, _JITTER = 10.0, 0.4, 2.0, 0.01

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """A run with a cause injected at a worker (`dp`, `pp`), a chunk of it, and the link to the next rank."""

    cause: str
    form: str
    pp: int = 4
    num_dp: int = 1
    vpp: int = 1
    seed: int = 0
    size: float = 1.0
    """Of the cause: 1 makes a rank 1.5 times slower, a link 30 times, lengths vary by 40 %."""

    @property
    def name(self) -> str:
        """The run in words."""
        sizes = f"PP{self.pp} DP{self.num_dp} VPP{self.vpp}"
        return f"{self.cause} x {self.size:.2f}, {self.form}, {sizes}, seed {self.seed}"

    @property
    def injects(self) -> bool:
        """Say whether the run is slow: clocks, missing ranks and events that are twice there cost nothing."""
        return self.cause not in ("none", *(cause for cause in CAUSES if cause.split()[0] in _NO_TIME))

    @property
    def at(self) -> tuple[int, int, int]:
        """Replica, pipeline rank and chunk where the cause is."""
        random = np.random.default_rng((self.seed, 7))
        last = self.pp - ("link" in self.cause)
        first = 0 if self.cause == "loader on one rank" else int(random.integers(last))
        return int(random.integers(self.num_dp)), first, int(random.integers(self.vpp))

    @property
    def schedule(self) -> Schedule:
        """1F1B, or interleaved where ranks have several chunks; micro-batches enough to fill the pipe."""
        name, vpp = ("interleaved", self.vpp) if self.vpp > 1 else ("1f1b", None)
        return treadle.generate(name, pp=self.pp, vpp=vpp, microbatches=max(8, min(2 * self.pp, 64)))


class Span(NamedTuple):
    """An action as it ran, milliseconds of the true clock: when its receive was posted and its rank free, it ran."""

    step: int
    action: Action
    stage: int
    posted: float
    free: float
    gap: float
    came: float | None
    start: float
    end: float
    sent: float | None


class _Injected:
    """What the cause makes of durations, messages and begins."""

    def __init__(self, run: Run) -> None:
        self.run, self.random = run, np.random.default_rng((run.seed, 11))
        self.dp, self.pp, self.chunk = run.at
        self.cause = run.cause
        num_mb = run.schedule.num_microbatches
        self.data = np.exp(self.random.normal(0, 0.4 * run.size, (NUM_STEPS, run.num_dp, num_mb)))
        self.paused = self.random.integers(2 * num_mb * run.vpp, size=(NUM_STEPS, 2))

    def took(self, step: int, dp: int, pp: int, action: Action) -> float:
        """Milliseconds of an action."""
        took = _FORWARD_MS / self.run.vpp * (1 if action.kind is Kind.F else 2) * self.random.normal(1, _JITTER)
        if (self.cause == "slow rank" and self._here(dp, pp)) or (
            self.cause == "slow stage" and (pp, action.chunk) == (self.pp, self.chunk)
        ):
            took *= 1 + 0.5 * self.run.size
        if self.cause == "unequal data":
            took *= self.data[step, dp, action.mb]
        return took * (1 + 2 * self.run.size if self.cause == "one slow step" and step == SLOW_STEP else 1)

    def message(self, dp: int, src: int, dst: int) -> float:
        """Milliseconds of a message."""
        slow = self.cause == "slow link in all replicas" or (self.cause == "slow link" and dp == self.dp)
        link = {src, dst} == {self.pp, self.pp + 1}
        return _MESSAGE_MS * self.random.normal(1, _JITTER) * (1 + 29 * self.run.size if slow and link else 1)

    def gap(self, step: int, dp: int, pp: int, place: int) -> float:
        """Milliseconds that the host of a worker takes before the op at this place of its row."""
        if not self._here(dp, pp):
            return 0.0
        if self.cause == "gaps of one rank":
            return 0.6 * self.run.size * _FORWARD_MS / self.run.vpp
        return 8 * self.run.size * _FORWARD_MS if self.cause == "pauses" and place in self.paused[step] else 0.0

    def late(self, dp: int, pp: int) -> float:
        """Milliseconds that a worker's step begins late."""
        num_mb = self.run.schedule.num_microbatches
        one = self.cause == "loader on one rank" and self._here(dp, pp)
        every = self.cause == "loader on all ranks" and pp == 0
        return _BETWEEN_MS + (8.0 * self.run.size * num_mb if one or every else 0)

    def _here(self, dp: int, pp: int) -> bool:
        return (dp, pp) == (self.dp, self.pp)


def execute(run: Run) -> dict[tuple[int, int], list[Span]]:
    """Execute the steps of a run; return what each worker did, by (dp, pp)."""
    made, schedule = _Injected(run), run.schedule
    stages = schedule.placement.stages
    holder = {stage: (p, c) for p, row in enumerate(stages) for c, stage in enumerate(row)}
    workers = [(dp, pp) for dp in range(run.num_dp) for pp in range(run.pp)]
    spans: dict[tuple[int, int], list[Span]] = {worker: [] for worker in workers}
    free = dict.fromkeys(workers, 0.0)
    for step in range(NUM_STEPS):
        came: dict[tuple[int, Kind, int, int], float] = {}
        begun = {worker: free[worker] + made.late(*worker) for worker in workers}
        free, at = dict(begun), dict.fromkeys(workers, 0)
        posted = {(worker, kind): begun[worker] for worker in workers for kind in (Kind.F, Kind.B)}
        ready = list(workers)
        while ready:
            worker = ready.pop()
            dp, pp = worker
            row = schedule.rows[pp]
            while at[worker] < len(row):
                action = row[at[worker]]
                assert isinstance(action, Action)
                stage = stages[pp][action.chunk]
                first = stage == (0 if action.kind is Kind.F else len(holder) - 1)
                key = (dp, action.kind, stage, action.mb)
                if not first and key not in came:
                    break
                gap = made.gap(step, dp, pp, at[worker])
                start = max(free[worker] + gap, came.get(key, 0.0))
                end = start + made.took(step, dp, pp, action)
                then = stage + (1 if action.kind is Kind.F else -1)
                sent = None
                if then in holder:
                    peer, _ = holder[then]
                    sent = end + (made.message(dp, pp, peer) if peer != pp else 0.0)
                    came[dp, action.kind, then, action.mb] = sent
                    ready.append((dp, peer))
                arrived = None if first or holder[stage - (1 if action.kind is Kind.F else -1)][0] == pp else came[key]
                spans[worker].append(
                    Span(step, action, stage, posted[worker, action.kind], free[worker], gap, arrived, start, end, sent)
                )
                free[worker] = posted[worker, action.kind] = end
                at[worker] += 1
        free = dict.fromkeys(workers, max(free.values()) + 1.0)
    return spans


# -- as trainers write it ----------------------------------------------------------------------------------------------


def write(run: Run, directory: Path) -> Path:
    """Execute a run, and write its profile into a directory."""
    spans = execute(run)
    if run.cause == "missing rank":
        del spans[run.at[:2]]
    {"NDTimeline": _ndtimeline, "Primus": _primus}.get(run.form, _kineto)(run, spans, directory)
    return directory


def _clock(run: Run, dp: int, pp: int) -> tuple[str, float]:
    """The name of a worker's clock, and by how many milliseconds it is ahead."""
    if run.cause == "clocks within a replica":
        return f"host{dp}.{pp}", float(np.random.default_rng((run.seed, dp, pp)).uniform(-30, 30)) * run.size
    if run.cause == "clocks between replicas":
        return f"host{dp}", 150.0 * dp * run.size
    return "host", 0.0


def _kineto(run: Run, spans: dict[tuple[int, int], list[Span]], directory: Path) -> None:
    for (dp, pp), own in spans.items():
        rank = pp * run.num_dp + dp
        host, ahead = _clock(run, dp, pp)
        events = list((_on_host if run.form == "torch on CPU" else _on_device)(run, own))
        if run.cause == "duplicated events" and (dp, pp) == run.at[:2]:
            events += [dict(event) for event in events[len(events) // 3 : len(events) // 2]]
        steps = [[s for s in own if s.step == step] for step in range(NUM_STEPS)]
        events += [_range(f"ProfilerStep#{k + 5}", s[0].free - 0.1, s[-1].end + 0.1) for k, s in enumerate(steps)]
        for event in events:
            event["ts"] = 1000 * (event["ts"] + ahead + 1000)
            event["dur"] *= 1000
        groups = [
            {"pg_desc": "mesh_pp", "ranks": [p * run.num_dp + dp for p in range(run.pp)]},
            {"pg_desc": "mesh_dp", "ranks": [pp * run.num_dp + d for d in range(run.num_dp)]},
        ]
        content = {
            "schemaVersion": 1,
            "deviceProperties": [],
            "distributedInfo": {"rank": rank, "world_size": run.pp * run.num_dp, "pg_config": groups},
            "host_name": host,
            "traceEvents": events,
        }
        (directory / f"rank{rank}_trace.json").write_text(json.dumps(content))


def _range(name: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    event = {"ph": "X", "cat": "user_annotation", "name": name, "pid": 7, "tid": 8, "ts": start, "dur": end - start}
    return {**event, **more}


def _on_host(_run: Run, own: list[Span]) -> Iterator[dict[str, Any]]:
    """torch's runtime on a CPU: a receive is posted, and found in the range of the computation, which waits for it."""
    for span in own:
        name, waits = f"{span.action.kind.name}{span.action.mb}", span.start
        if span.came is not None:
            waits = span.free + span.gap
            yield _range(f"PP:{span.stage}RECV_{name}", waits - 0.02, waits - 0.001)
            yield _range("gloo:recv", waits - 0.01, span.start + 0.001)
        yield _range(f"PP:{span.stage}{name}", waits, span.end)
        if span.sent is not None and span.sent > span.end:
            yield _range(f"PP:{span.stage}SEND_{name}", span.end + 0.001, span.end + 0.01)
            yield _range("gloo:send", span.end + 0.005, span.sent)


def _on_device(_run: Run, own: list[Span]) -> Iterator[dict[str, Any]]:
    """Kernels of a computation and of messages, launched a little before by ranges of the host."""
    for number, span in enumerate(own):
        name = f"{span.action.kind.name}{span.action.mb}"
        at = span.free + 1e-4 * number
        parts = [(f"PP:{span.stage}{name}", span.start, span.end, "gemm", 7)]
        if span.came is not None:
            moved = (
                f"PP:{span.stage}RECV_{name}",
                span.posted,
                max(span.came, span.posted + 0.01),
                "ncclDevKernel",
                20,
            )
            parts.insert(0, moved)
        if span.sent is not None and span.sent > span.end:
            parts.append((f"PP:{span.stage}SEND_{name}", span.end, span.sent, "ncclDevKernel", 21))
        for place, (label, start, end, kernel, stream) in enumerate(parts):
            launched, ids = at + 0.003 * place, {"correlation": 4 * number + place + 1}
            yield _range(label, launched, launched + 0.002)
            yield _range("cudaLaunchKernel", launched + 0.001, launched + 0.0015, cat="cuda_runtime", args=ids)
            yield _range(kernel, start, end, cat="kernel", tid=stream, args={**ids, "stream": stream})


def _ndtimeline(run: Run, spans: dict[tuple[int, int], list[Span]], directory: Path) -> None:
    events: list[dict[str, Any]] = []
    for (dp, pp), own in spans.items():
        _, ahead = _clock(run, dp, pp)
        of_worker: list[dict[str, Any]] = []
        for span in own:
            way = "forward" if span.action.kind is Kind.F else "backward"
            labels = {"step": span.step, "model_chunk": span.action.chunk, "mb_id": span.action.mb}
            unnamed = {"step": span.step, "model_chunk": -1, "mb_id": -1}
            parts = [(f"{way}-compute", span.start, span.end, labels)]
            if span.came is not None:
                parts.append((f"{way}-recv", span.posted, max(span.came, span.posted + 0.01), unnamed))
            if span.sent is not None and span.sent > span.end:
                parts.append((f"{way}-send", span.end, span.sent, unnamed))
            of_worker += [
                {
                    "name": name,
                    "pid": dp,
                    "tid": pp,
                    "ph": "X",
                    "ts": 1000 * (a + ahead),
                    "dur": 1000 * (b - a),
                    "args": c,
                }
                for name, a, b, c in parts
            ]
        if run.cause == "duplicated events" and (dp, pp) == run.at[:2]:
            of_worker += [event for event in of_worker[len(of_worker) // 3 :] if event["name"].endswith("compute")][:9]
        events += of_worker
    names = [
        {"name": "process_name", "pid": dp, "ph": "M", "args": {"name": f"DP rank [{dp}]"}} for dp in range(run.num_dp)
    ]
    names += [
        {"name": "thread_name", "pid": dp, "tid": pp, "ph": "M", "args": {"name": f"PP rank {pp}, TP rank 0, all"}}
        for dp, pp in spans
    ]
    (directory / "timeline.json").write_text(json.dumps(names + events))


def _primus(run: Run, spans: dict[tuple[int, int], list[Span]], directory: Path) -> None:
    """Times since the step began on the rank; of the first replica only, which is all that Primus writes."""
    sizes = {"pp_size": run.pp, "vp_size": run.vpp, "num_mbs": run.schedule.num_microbatches, "dp_size": run.num_dp}
    (directory / "config.json").write_text(json.dumps(sizes))
    first = [own for (dp, _), own in spans.items() if dp == 0]
    begins = [min(span.free for own in first for span in own if span.step == step) for step in range(NUM_STEPS)]
    ends = [*begins[1:], max(own[-1].end for own in first) + 1.0]
    for (dp, pp), own in spans.items():
        if dp:
            continue
        content: dict[str, Any] = {}
        for step in range(NUM_STEPS):
            here = [span for span in own if span.step == step]
            if run.cause == "duplicated events" and pp == run.at[1]:
                here = [*here, here[3]]
            fields: dict[str, Any] = {"total": ends[step] - begins[step]}
            for kind, name in ((Kind.F, "fwd"), (Kind.B, "bwd")):
                chosen = [span for span in here if span.action.kind is kind]
                fields[f"{name}_start"] = [span.start - begins[step] for span in chosen]
                fields[f"{name}_end"] = [span.end - begins[step] for span in chosen]
                fields[f"{name}_minibatch"] = [span.action.mb for span in chosen]
                fields[f"{name}_chunk"] = [span.action.chunk for span in chosen]
            content[str(step + 1)] = fields
        (directory / f"pp_rank_{pp}.json").write_text(json.dumps(content))


# -- what is found -----------------------------------------------------------------------------------------------------


def verdict(run: Run, directory: Path) -> tuple[str, str]:
    """Write a run, read it as `treadle why` does, and judge the cause that is named; with its sentence."""
    try:
        report = analyse(import_profile([write(run, directory)]).steps)
    except ValueError as error:
        return ("right" if run.cause == "missing rank" else "missed"), str(error)
    cause = report.cause
    named = (cause.what, cause.stage, cause.pp, cause.dp)
    if named in _right(run, cause.sentence):
        return ("not to be told apart" if "not to be told apart" in cause.sentence else "right"), cause.sentence
    if cause.what in ("none", "several"):
        return ("small" if run.injects and cost(run) < SMALL else "missed"), cause.sentence
    return "wrong", cause.sentence


def held_out(cause: str, form: str, sizes: tuple[int, int, int], seed: int) -> Run:
    """A run of a seed that was held out, with the magnitude that the seed draws: between 0.4 and 2.2."""
    return Run(cause, form, *sizes, seed, float(np.exp(np.random.default_rng(seed).uniform(-0.9, 0.8))))


def cost(run: Run) -> float:
    """The share of a step that the injected cause costs: against the same run without it."""
    periods = []
    for each in (run, replace(run, cause="none")):
        begins = [[own[0].free for own in of_step] for of_step in _by_step(execute(each))]
        periods.append(min(begins[-1]) - min(begins[0]))
    return 1 - periods[1] / periods[0]


def _by_step(spans: dict[tuple[int, int], list[Span]]) -> list[list[list[Span]]]:
    return [[[s for s in own if s.step == step] for own in spans.values()] for step in range(NUM_STEPS)]


_Named = tuple[str, int | None, int | None, int | None]


def _right(run: Run, sentence: str) -> set[_Named]:
    """The causes that are right, as (what, stage, pp, dp)."""
    dp, pp, chunk = run.at
    replica = dp if run.num_dp > 1 else None
    stage = run.schedule.placement.stages[pp][chunk]
    either: _Named = ("stage or rank", stage, pp, None)
    apart = "not to be told apart" in sentence
    if run.cause in ("slow link", "slow link in all replicas"):
        one = None if run.cause.endswith("replicas") else replica
        linked = f"between ranks {pp} and {pp + 1}" in sentence
        what = "communication" if run.form != "Primus" else "gaps"
        return {(what, None, None, one)} if linked and apart == (run.form == "Primus") else set()
    if run.cause == "slow rank" and run.num_dp == 1:
        return {("rank", None, pp, None)} if run.vpp > 1 else {either}
    if run.cause == "slow stage":
        return {("stage", stage, None, None)} if run.num_dp > 1 or run.vpp > 1 else {either}
    clocks: set[_Named] = {("none", None, None, None)}
    if run.form == "NDTimeline" and run.num_dp > 1 and apart:  # it names one clock for all
        clocks |= {("between", None, 0, number) for number in range(run.num_dp)}
    found: dict[str, set[_Named]] = {
        "slow rank": {("worker", None, pp, dp)},
        "gaps of one rank": {("gaps", None, pp, replica)},
        "pauses": {("gaps", None, pp, replica), ("pauses", None, pp, replica)},
        "loader on one rank": {("between", None, None if replica is None else 0, replica)},
        "loader on all ranks": {("between", None, None, None)},
        "unequal data": {("microbatches", None, None, None)},
        "one slow step": {("steps", None, None, None)},
        "clocks within a replica": clocks,
        "clocks between replicas": clocks,
    }
    return found.get(run.cause, {("none", None, None, None)})
