"""Every wait of a pipeline has a deadline: whatever happens to a rank at any op, all others name it, and soon.

A fault is a real one in a real process: it is killed, stopped, asleep, or raises, before or after what one of its
instructions does. Twenty of them are drawn at random, sixty at night; the rest have names.
"""

from __future__ import annotations

import multiprocessing.process
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import treadle
from tests.support.faults import AGREEMENT, HANGS, CallName, Faults, deadlines_for, hold_to, meet_with, note
from tests.support.oracle import chunks_of, make_mesh
from tests.support.patience import PATIENT_S, SOON_S
from tests.support.ranks import Failure, Outcome, run_ranks
from treadle.ir.ops import OpKind
from treadle.ir.program import Op, Program
from treadle.lowering.running import expected, host_order, lower_running
from treadle.runtime import pipeline as pipeline_module
from treadle.runtime import rank_part, stage_recipe
from treadle.runtime.faults.watch import EXIT_LOST
from treadle.runtime.model.stage import Stage
from treadle.runtime.run.handlers import HANDLERS
from treadle.runtime.run.instructions import drains, in_parts
from treadle.runtime.run.rank_program import RankProgram
from treadle.schedules import SCHEDULES, Size

pytestmark = pytest.mark.slow

SEED = 20250728
NUM_CASES, NUM_AT_NIGHT, BATCH = 20, 60, 10
AT_ONCE = 6
"""Cases of a batch that run side by side: they mostly wait."""

LONG_S = PATIENT_S
"""The deadline for what is no hang: nobody may need it to come out of a wait."""

END_S = 4.0
"""A rank that hangs is given this long to react before it ends itself."""

KINDS = {"kill": "killed", "stop": "hung", "sleep": "hung", "raise": "raised"}
SHAPES = [(2, 1), (4, 1), (2, 2)]
WAYS = list(product(KINDS, (0, 1), (False, True)))


# -- what a case is ----------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Something a rank does in a step: where in its list, its op as told and as faults name it, and the call."""

    at: int
    sort: str
    op: str
    name: str
    call: CallName


@dataclass(frozen=True)
class Case:
    """What happens to `rank` at `place` of step `step`."""

    name: str
    pp: int
    dp: int
    rank: int
    step: int
    place: Place
    kind: str
    after: bool

    def __str__(self) -> str:
        when = f"{'after' if self.after else 'before'} [{self.place.at}] {self.place.sort}, {self.place.op}"
        return f"{self.name} pp={self.pp} dp={self.dp}: {self.kind} rank {self.rank}, step {self.step}, {when}"

    @property
    def world(self) -> int:
        return self.pp * self.dp

    @property
    def is_hang(self) -> bool:
        return self.kind in HANGS


@cache
def schedule_of(name: str, pp: int) -> treadle.Schedule:
    family = SCHEDULES[name]
    size = family.nearest(Size(pp, family.default_vpp, pp + 2))
    assert size is not None
    assert size.pp == pp
    return family.generate(size)


@cache
def program_of(name: str, pp: int, dp: int) -> Program:
    schedule = schedule_of(name, pp)
    return lower_running(schedule, reduce=dp > 1 or schedule.placement.num_pipes > 1)


def told(op: Op, rank: int, dp: int) -> str:
    """An op of a rank as its loss is told, with the ranks' numbers in the world."""
    peer = op.lane.peer * dp + rank % dp
    if op.kind.is_send:
        return f"send {op.label} to rank {peer}"
    return f"receive {op.label} from rank {peer}" if op.kind.is_recv else op.label


@cache
def places(name: str, pp: int, dp: int, rank: int) -> list[Place]:
    """All that a rank does in a step, in its order."""
    program, anything = program_of(name, pp, dp), mock.MagicMock()
    stages = dict.fromkeys(range(schedule_of(name, pp).vpp), Stage(0, nn.Identity(), None, None, 0))
    part = RankProgram(program, rank // dp, stages, anything, anything, anything, lambda place: place * dp + rank % dp)
    own = [program.op(int(index)) for index in host_order(program, expected(program))[rank // dp]]
    listed = [*in_parts(part, own, [HANDLERS[op.kind](part, op) for op in own]), *drains(part, own)]
    found: list[Place] = []
    times: Counter[int] = Counter()
    for index, instruction in enumerate(listed):
        op = program.op(instruction.op)
        call = calls_of(op.kind)[times[op.index]]
        launch = "wait" if times[op.index] else "launch"  # what talks comes twice, first when it is launched
        sort = op.kind.name if op.kind <= OpKind.W else f"{launch} {op.kind.name}"
        times[op.index] += 1
        found.append(Place(index, sort, told(op, rank, dp), str(op), call))
    return [*found, Place(len(listed), "AGREE", AGREEMENT, AGREEMENT, "launch")]


def calls_of(kind: OpKind) -> tuple[CallName, ...]:
    """The calls of an op in the order of the list."""
    if kind is OpKind.REDUCE_GRAD:
        return "prepare", "launch", "finish"
    return ("launch", "drain") if kind.is_send else ("launch", "finish")


@cache
def all_sorts() -> set[str]:
    """The sorts of what any rank does under any schedule."""
    return {place.sort for name in SCHEDULES for place in places(name, 2, 2, 0)}


def draw(number: int) -> Case:
    """One of the cases. Schedules, kinds, steps, before and after go round, and sorts of ops; all else is random."""
    rng = random.Random(f"{SEED}/{number}")
    name = list(SCHEDULES)[number % len(SCHEDULES)]
    kind = list(KINDS)[(number + number // 20) % len(KINDS)]
    step, after = number // 4 % 2, number // 8 % 2 == 1
    pp, dp = rng.choice(SHAPES)
    rank = rng.randrange(pp * dp)
    listed = places(name, pp, dp, rank)
    turn = sorted(all_sorts())[number % len(all_sorts())]
    sorts = sorted({place.sort for place in listed})
    sort = turn if turn in sorts else rng.choice(sorts)
    place = rng.choice([place for place in listed if place.sort == sort])
    return Case(name, pp, dp, rank, step, place, kind, after)


# -- what a rank does --------------------------------------------------------------------------------------------------


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def make_stages(schedule: treadle.Schedule) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(schedule.placement.num_stages)]


def make_pipe(
    name: str, pp: int, dp: int, deadline_s: float, stages: list[nn.Module] | None = None
) -> treadle.Pipeline:
    schedule, mesh = schedule_of(name, pp), make_mesh(pp, dp)
    own = chunks_of(schedule, mesh.get_local_rank("pp"), stages if stages is not None else make_stages(schedule))
    program_of(name, pp, dp)  # and what is compiled for it is loaded
    dist.barrier()  # the deadline is short, and ranks do not start at the same time
    return treadle.Pipeline(own, schedule, mesh=mesh, loss_fn=mean_square, deadline_s=deadline_s)


@contextmanager
def timed() -> Iterator[None]:
    """What is raised inside has the time at which it was."""
    try:
        yield
    except Exception as error:
        error.at_s = time.monotonic()  # type: ignore[attr-defined]
        raise


def run_steps(pipe: treadle.Pipeline, num_steps: int) -> None:
    batch = torch.ones(pipe.schedule.num_microbatches * 2, 4)
    with timed():
        for _ in range(num_steps):
            pipe.step(batch, batch)


def arm(case: Case, directory: Path) -> None:
    """Put the fault before or after its call, in the step of the case."""
    before, after = ("", case.place.name) if case.after else (case.place.name, "")
    add = {"kill": Faults.kill, "stop": Faults.stop, "sleep": Faults.sleep, "raise": Faults.fail}[case.kind]
    faults = add(Faults(directory), rank=case.rank, step=case.step, before=before, after=after, call=case.place.call)
    faults.arm(case.rank)


def take_part(rank: int, case: Case, deadline_s: float, directory: Path) -> None:
    note(directory, rank, "pid", str(os.getpid()))
    if rank == case.rank:
        arm(case, directory)
    run_steps(make_pipe(case.name, case.pp, case.dp, deadline_s), case.step + 3)


# -- what is asked of them ---------------------------------------------------------------------------------------------


def failure_of(outcome: Outcome[None]) -> Failure:
    assert not outcome.timed_out, f"the harness had to end it:\n{outcome}"
    assert outcome.error is not None, f"it did not raise: {outcome}"
    assert outcome.exitcode == 1, str(outcome)
    return outcome.error


def look_at_survivor(
    outcome: Outcome[None], lost: tuple[int, str, str | None], places_here: Collection[str]
) -> tuple[float, str]:
    """Holds what a survivor raised against what happened: when it did, and its words."""
    error = failure_of(outcome)
    assert error.type == "RankLostError", error.traceback
    seen = error.attributes
    assert (seen["rank"], seen["kind"], seen["op"]) == lost, error.message
    found = re.search(r"This rank \((\d+)\) was (between steps|at (.+?))(?:, waiting for (.+))?\.$", error.message)
    assert found is not None, error.message
    assert int(found[1]) == outcome.rank, error.message
    if found[3] is not None:
        assert found[3] in places_here, error.message
        assert seen["waiting_for"] is not None, error.message
        assert found[4] == seen["waiting_for"], error.message
    return float(seen["at_s"]), error.message


def look_at_victim(outcome: Outcome[None], kind: str) -> None:
    assert not outcome.timed_out, f"the harness had to end it:\n{outcome}"
    match kind:
        case "raise":
            error = failure_of(outcome)
            assert (error.type, error.message) == ("ValueError", "bad batch"), error.traceback
        case "sleep":
            assert outcome.exitcode == EXIT_LOST, f"it ends itself: {outcome}"
            assert f"rank {outcome.rank} did not react and was ended" in outcome.stderr
        case _:
            assert outcome.exitcode == -signal.SIGKILL, str(outcome)


def nothing_left(directory: Path) -> None:
    for file in directory.glob("pid*"):
        assert not Path(f"/proc/{file.read_text()}").exists(), f"rank {file.name[3:]} is still there"


def run_case(case: Case, directory: Path) -> float:
    """Runs a case and holds it to the promise; how long after the fault the last survivor raised."""
    directory.mkdir()
    fault = directory / f"fault{case.rank}"

    def run(deadline_s: float) -> list[Outcome[None]]:
        outcomes = run_ranks(case.world, take_part, case, deadline_s, directory, new=True)
        nothing_left(directory)
        return outcomes

    return hold_to(fault, deadlines_for(case.kind), run, partial(judge, case, fault))


def judge(case: Case, fault: Path, outcomes: list[Outcome[None]], deadline_s: float) -> float:
    fault_s, allowed_s = float(fault.read_text()), SOON_S + (deadline_s if case.is_hang else 0.0)
    took_s = []
    for outcome in outcomes:
        if outcome.rank != case.rank:
            own = {place.op for place in places(case.name, case.pp, case.dp, outcome.rank)}
            at_s, words = look_at_survivor(outcome, (case.rank, KINDS[case.kind], case.place.op), own)
            took_s.append(at_s - fault_s)
            assert took_s[-1] <= allowed_s, f"rank {outcome.rank} raised {took_s[-1]:.1f} s after the fault"
            assert f" at {case.place.op} (step {case.step})" in words
        allowed_end_s = allowed_s + (END_S if outcome.rank == case.rank else 1.0)
        assert outcome.ended_s - fault_s <= allowed_end_s, f"{outcome.ended_s - fault_s:.1f} s to its end: {outcome}"
    look_at_victim(outcomes[case.rank], case.kind)
    return max(took_s)


@pytest.fixture
def side_by_side() -> Iterator[ThreadPoolExecutor]:
    """Threads to run cases in. A process that starts looks after those that have ended, which is not for threads:

    of two that ask for an exit code at once, one would get it and the other 255. Each case asks for its own.
    """
    with mock.patch.object(multiprocessing.process, "_cleanup"), ThreadPoolExecutor(AT_ONCE) as pool:
        yield pool


def all_hold(pool: ThreadPoolExecutor, checks: dict[str, Callable[[], float]]) -> None:
    """Runs all checks; each says how long after the fault the last survivor raised, or fails under its own name."""
    futures = {name: pool.submit(check) for name, check in checks.items()}
    failed = []
    for name, future in futures.items():
        error = future.exception()
        if error is None:
            print(f"{future.result():5.2f} s  {name}")  # noqa: T201
        else:
            failed.append(f"{name}\n{type(error).__name__}: {error}")
    assert not failed, f"{len(failed)} of {len(futures)} cases\n\n" + "\n\n".join(failed)


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.nightly] if first >= NUM_CASES else [])
        for first in range(0, NUM_AT_NIGHT, BATCH)
    ],
)
def test_whatever_happens_to_a_rank_all_others_name_it(
    first: int, tmp_path: Path, side_by_side: ThreadPoolExecutor
) -> None:
    longest_first = ("sleep", "stop", "kill", "raise")
    numbers = sorted(range(first, first + BATCH), key=lambda n: longest_first.index(draw(n).kind))
    all_hold(
        side_by_side,
        {f"case {n}: {draw(n)}": partial(run_case, draw(n), tmp_path / str(n)) for n in numbers},
    )


def test_the_cases_cover_everything() -> None:
    drawn = [draw(number) for number in range(NUM_AT_NIGHT)]
    first = drawn[:NUM_CASES]
    assert {(case.name, case.kind) for case in drawn} == {(name, kind) for name in SCHEDULES for kind in KINDS}
    assert {case.name for case in first} == set(SCHEDULES)
    assert {(case.kind, case.step, case.after) for case in first} == set(WAYS)
    assert {case.place.sort for case in first} == all_sorts()
    assert {case.rank for case in first} == {0, 1, 2, 3}
    assert {(case.pp, case.dp) for case in first} == set(SHAPES)
    assert {(case.pp, case.dp) for case in drawn if case.name == "dualpipe"} == set(SHAPES)


# -- what is not at an op ----------------------------------------------------------------------------------------------

WORLD = 4
VICTIM = 1
SIZES = [("1f1b", 2, 2), ("1f1b", 4, 1), ("zb-v", 4, 1), ("dualpipev", 4, 1)]
"""What runs here: (schedule, pp, dp)."""

MAKING, TRACE = "making the pipeline", "gather_trace()"


def in_making(rank: int, kind: str, deadline_s: float, directory: Path) -> None:
    """Two pipelines; one rank has its fault after it met the others, who wait for it then or in their first step."""
    note(directory, rank, "pid", str(os.getpid()))
    if rank == VICTIM:
        # A stage is made by this rank alone; what claims_of_copies raises, all others raise too.
        module, name = (stage_recipe, "Stage") if kind == "raise" else (rank_part, "claims_of_copies")
        faulty = mock.patch.object(module, name, side_effect=lambda *_: meet_with(kind, rank, directory))
        faulty.start()  # refuses a name that is not there
    with timed():
        run_steps(make_pipe("1f1b", 2, 2, deadline_s), 2)


def between_steps(rank: int, kind: str, deadline_s: float, directory: Path) -> None:
    note(directory, rank, "pid", str(os.getpid()))
    pipe = make_pipe("zb-v", 4, 1, deadline_s)
    run_steps(pipe, 1)
    if rank == VICTIM:
        note(directory, rank, "fault", str(time.monotonic()))
        if kind == "close":
            pipe.close()
        elif kind != "return":
            meet_with(kind, rank, directory)
        return
    run_steps(pipe, 2)


def in_trace(rank: int, kind: str, deadline_s: float, directory: Path) -> None:
    note(directory, rank, "pid", str(os.getpid()))
    pipe = make_pipe("1f1b", 4, 1, deadline_s)
    run_steps(pipe, 1)
    if rank == VICTIM:
        pipeline_module.clock_offset = lambda *_: meet_with(kind, rank, directory)  # type: ignore
    with timed():
        _ = pipe.gather_trace()


def in_stage(rank: int, kind: str, deadline_s: float, directory: Path) -> None:
    """A stage's own error, of a type that waits raise too, or with words that they use."""
    error = RuntimeError("bad shape") if kind == "RuntimeError" else ConnectionError("Connection reset by peer")
    stages = make_stages(schedule_of("dualpipev", 4))
    if rank == VICTIM:

        def fail(*_: object) -> None:
            note(directory, rank, "fault", str(time.monotonic()))
            raise error

        stages[VICTIM].register_forward_pre_hook(fail)
    note(directory, rank, "pid", str(os.getpid()))
    run_steps(make_pipe("dualpipev", 4, 1, deadline_s, stages), 1)


def staying(rank: int, kind: str, deadline_s: float, directory: Path) -> None:
    """Survivors end when all of them were told, so nobody comes out of a wait because another's connections closed."""
    note(directory, rank, "pid", str(os.getpid()))
    if rank == VICTIM:
        arm(Case("zb-v", 4, 1, rank, 1, places("zb-v", 4, 1, rank)[10], kind, False), directory)
    pipe = make_pipe("zb-v", 4, 1, deadline_s)
    try:
        run_steps(pipe, 3)
    except treadle.RankLostError:
        note(directory, rank, "told", "")
        give_up_s = time.monotonic() + SOON_S
        while len(list(directory.glob("told*"))) < WORLD - 1 and time.monotonic() < give_up_s:
            time.sleep(0.01)
        raise


class Scene(NamedTuple):
    """What the ranks do, the fault of the victim, and how its loss is to be told: (kind, op), and the words after it.

    `ends`: the exit code of the victim, where the fault does not say.
    """

    fn: Callable[[int, str, float, Path], None]
    fault: str
    lost: tuple[str, str | None]
    words: str
    ends: int | None = None


def run_scene(scene: Scene, directory: Path) -> float:
    """All survivors say that it was the victim, and soon; how long after the fault the last of them did."""
    directory.mkdir()
    fault = directory / f"fault{VICTIM}"

    def run(deadline_s: float) -> list[Outcome[None]]:
        outcomes = run_ranks(WORLD, scene.fn, scene.fault, deadline_s, directory, new=True)
        nothing_left(directory)
        return outcomes

    return hold_to(fault, deadlines_for(scene.fault, least_s=4.0), run, partial(judge_scene, scene, fault))


def judge_scene(scene: Scene, fault: Path, outcomes: list[Outcome[None]], deadline_s: float) -> float:
    fault_s, allowed_s = float(fault.read_text()), SOON_S + (deadline_s if scene.fault in HANGS else 0.0)
    took_s = []
    for outcome in outcomes:
        if outcome.rank != VICTIM:
            own = {place.op for size in SIZES for place in places(*size, outcome.rank)} | {MAKING, TRACE}
            at_s, words = look_at_survivor(outcome, (VICTIM, *scene.lost), own)
            took_s.append(at_s - fault_s)
            assert took_s[-1] <= allowed_s, f"rank {outcome.rank} raised {took_s[-1]:.1f} s after the fault"
            assert f"rank {VICTIM} was lost first: {scene.words}" in words, words
    if scene.ends is None:
        look_at_victim(outcomes[VICTIM], scene.fault)
    else:
        assert outcomes[VICTIM].exitcode == scene.ends
    return max(took_s)


def all_scenes(pool: ThreadPoolExecutor, directory: Path, scenes: list[Scene]) -> None:
    all_hold(pool, {scene.fault: partial(run_scene, scene, directory / scene.fault) for scene in scenes})


def test_a_fault_while_pipelines_are_made(tmp_path: Path, side_by_side: ThreadPoolExecutor) -> None:
    words = {
        "kill": f"killed at {MAKING}. This",
        "stop": f"hung at {MAKING}, without a sign of life",
        "sleep": f"hung at {MAKING}, where it had been",
        "raise": f"raised ValueError at {MAKING}: bad batch. This",
    }
    scenes = [Scene(in_making, fault, (kind, MAKING), words[fault]) for fault, kind in KINDS.items()]
    all_scenes(side_by_side, tmp_path, scenes)


def test_a_fault_between_steps(tmp_path: Path, side_by_side: ThreadPoolExecutor) -> None:
    scenes = [
        Scene(between_steps, fault, (KINDS[fault], None), f"{KINDS[fault]} between steps, after step 0")
        for fault in ("kill", "stop", "sleep")
    ]
    all_scenes(side_by_side, tmp_path, scenes)


def test_a_rank_that_leaves_early(tmp_path: Path, side_by_side: ThreadPoolExecutor) -> None:
    """Its process ends, well or not, while the others need it for another step."""
    words = (
        "it ended or closed its Pipeline between steps, after step 0. If its log shows no error, do all ranks run the "
        "same number of steps?"
    )
    scenes = [
        Scene(between_steps, fault, ("left", None), words, ends=1 if fault == "raise" else 0)
        for fault in ("close", "return", "raise")
    ]
    all_scenes(side_by_side, tmp_path, scenes)


def test_a_fault_while_ranks_put_a_trace_together(tmp_path: Path, side_by_side: ThreadPoolExecutor) -> None:
    scenes = [
        Scene(in_trace, fault, (KINDS[fault], TRACE), f"{KINDS[fault]} at {TRACE} (step 1)")
        for fault in ("kill", "sleep")
    ]
    all_scenes(side_by_side, tmp_path, scenes)


def test_an_error_of_a_stage_that_looks_like_that_of_a_wait(tmp_path: Path, side_by_side: ThreadPoolExecutor) -> None:
    scenes = [
        Scene(in_stage, fault, ("raised", "F0.0"), f"raised {fault} at F0.0 (step 0): ", ends=1)
        for fault in ("RuntimeError", "ConnectionError")
    ]
    all_scenes(side_by_side, tmp_path, scenes)


def test_survivors_that_stay_hold_nobody_up(tmp_path: Path, side_by_side: ThreadPoolExecutor) -> None:
    op = places("zb-v", 4, 1, VICTIM)[10].op
    scenes = [Scene(staying, fault, (KINDS[fault], op), KINDS[fault]) for fault in ("kill", "raise")]
    all_scenes(side_by_side, tmp_path, scenes)


def test_the_other_pipeline_hangs_before_gradients_of_copies_meet(
    tmp_path: Path, side_by_side: ThreadPoolExecutor
) -> None:
    """Ranks 0 and 2 wait in a reduction with 1 and 3, their copies, and nothing else connects them."""
    cases = []
    for rank in (1, 3):
        last = [place for place in places("dualpipe", 2, 2, rank) if place.sort in ("B", "W")][-1]
        cases += [Case("dualpipe", 2, 2, rank, step, last, "sleep", False) for step in (0, 1)]
    all_hold(side_by_side, {str(c): partial(run_case, c, tmp_path / f"{c.rank}{c.step}") for c in cases})
