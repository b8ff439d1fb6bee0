"""A module in a pipeline does what it does in one process: modules of many shapes, at both grains, on all schedules.

`tests/support/module_shapes.py` has the shapes. Two steps add up their gradients. What a pipeline cannot do is refused
by name, on every rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from tests.support.cases import Grads, pipeline, refusals, schedule_of, square_loss
from tests.support.devices import DEVICE_TYPE
from tests.support.module_shapes import (
    CHANGES,
    HOOKS,
    SHAPES,
    WIDTH,
    Layer,
    Shape,
    in_float64,
    linear,
    make_batch,
    make_stages,
)
from tests.support.oracle import cut, grads_of, make_mesh, run_whole, worst
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, close_at_end, run_ranks
from treadle.runtime.model.segments import Segment, compute
from treadle.schedules import SCHEDULES

PP, MB, STEPS = 2, 4, 2
SPLIT = ("zb-h1", "zb-v", "v-half", "v-min", "dualpipe", "dualpipev")
"""Schedules with weight gradients apart."""
CASES = [(name, grain) for name, shape in SHAPES.items() for grain in shape.grains]


class Ran(NamedTuple):
    """What came of the steps of one shape: what was raised, or losses, gradients, and what modules wrote to buffers."""

    error: str
    losses: list[float]
    grads: Grads
    buffers: dict[str, Tensor]


def today(schedule: str) -> list[tuple[str, str]]:
    """Some of the cases: over all schedules, each shape on one that splits backwards and on one that does not.

    A shape that has both grains has one of them on the first, the other on the second.
    """
    splits = schedule in SPLIT
    alike = [name for name in SCHEDULES if (name in SPLIT) == splits]
    chosen = []
    for number, (name, shape) in enumerate(SHAPES.items()):
        if number % len(alike) == alike.index(schedule):
            chosen.append((name, shape.grains[(number // len(SPLIT) + splits) % len(shape.grains)]))
    return chosen


def buffers_of(stages: dict[int, nn.Module]) -> dict[str, Tensor]:
    return {f"{at}.{name}": b.clone() for at, stage in stages.items() for name, b in stage.named_buffers()}


def dense(grads: Grads) -> Grads:
    return {name: grad.to_dense() if grad is not None else None for name, grad in grads.items()}


def evaluates(shape: Shape) -> bool:
    """Whether an evaluation has a forward of its own to look at."""
    return shape.late is not None and shape.stage is not None


def run_shape(schedule: treadle.Schedule, shape: Shape, grain: str) -> Ran:
    """Two steps of a pipeline, and perhaps an evaluation."""
    mesh = make_mesh(PP)
    stages = make_stages(shape, schedule.placement.num_stages, grain)
    own = {number: stages[number] for number in schedule.placement.stages[mesh.get_local_rank("pp")]}
    try:
        pipe = pipeline(schedule, stages, mesh, square_loss, deadline_s=PATIENT_S)
        for stage in own.values() if shape.late is not None else ():
            cast(Any, shape.late)(stage)
        losses = [float(pipe.step(*make_batch(MB, step))) for step in range(STEPS)]
        losses += [float(pipe.evaluate(*make_batch(MB, 0)))] if evaluates(shape) else []
        pipe.close()
    except Exception as error:
        return Ran(f"{type(error).__name__}: {error}", [], {}, {})
    return Ran("", losses, dense(grads_of(own)), buffers_of(own))


def run_shapes(rank: int, name: str, cases: Sequence[tuple[str, str]]) -> list[Ran]:
    del rank
    torch.set_warn_always(False)
    schedule = schedule_of(name, PP, MB)
    return [run_shape(schedule, SHAPES[shape], grain) for shape, grain in cases]


def whole(shape: Shape, num_stages: int, grain: str) -> Ran:
    stages = make_stages(shape, num_stages, grain)
    for stage in stages if shape.late is not None else ():
        cast(Any, shape.late)(stage)
    losses = []
    for step in range(STEPS):
        told = run_whole(stages, cut([make_batch(MB, step)], MB), square_loss)
        losses.append(sum(told) / MB)
    named = dict(enumerate(stages))
    grads, buffers = dense(grads_of(named)), buffers_of(named)
    if evaluates(shape):
        told = run_whole(stages, cut([make_batch(MB, 0)], MB), square_loss)
        losses.append(sum(told) / MB)
    return Ran("", losses, grads, buffers)


def differences(name: str, cases: Sequence[tuple[str, str]]) -> list[str]:
    """The shapes that differ from one process under a schedule, and in what."""
    placement = schedule_of(name, PP, MB).placement
    found = []
    for (shape, grain), *ranks in zip(cases, *check(run_ranks(PP, run_shapes, name, cases)), strict=True):
        wanted = whole(SHAPES[shape], placement.num_stages, grain)
        for rank, ran in enumerate(ranks):
            where = f"{shape} ({grain}) on {name}, rank {rank}"
            if ran.error:
                found.append(f"{where}: {ran.error}")
                continue
            if ran.losses != pytest.approx(wanted.losses, rel=SHAPES[shape].most):
                found.append(f"{where}: losses {ran.losses} for {wanted.losses}")
            difference, at = worst(ran.grads, wanted.grads)
            if difference > SHAPES[shape].most:
                found.append(f"{where}: the gradient of {at} differs by {difference}")
            difference, at = worst(ran.buffers, wanted.buffers)
            if placement.num_pipes == 1 and difference > SHAPES[shape].most:
                found.append(f"{where}: the buffer {at} differs by {difference}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_modules_of_all_shapes_are_those_of_one_process(name: str) -> None:
    assert not differences(name, today(name))


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCHEDULES)
def test_all_modules_on_all_schedules_are_those_of_one_process(name: str) -> None:
    assert not differences(name, [case for case in CASES if case not in today(name)])


def test_each_shape_is_on_a_schedule_that_splits_and_on_one_that_does_not() -> None:
    halved = [n for n in SCHEDULES if (schedule_of(n, PP, MB).columns.kind == treadle.ir.Kind.W).any()]
    assert halved == [name for name in SCHEDULES if name in SPLIT]
    listed = [(shape, name in SPLIT) for name in SCHEDULES for shape, _ in today(name)]
    assert sorted(listed) == sorted((shape, splits) for shape in SHAPES for splits in (False, True))
    assert {case for name in SCHEDULES for case in today(name)} == set(CASES)


# -- buffers of copies -------------------------------------------------------------------------------------------------


def run_batch_norm(rank: int) -> dict[str, Tensor]:
    del rank
    return run_shape(schedule_of("dualpipe", PP, MB), SHAPES["BatchNorm"], "plain").buffers


def test_each_copy_of_a_stage_has_the_buffers_of_its_own_micro_batches() -> None:
    """dualpipe: the first half of the micro-batches passes one copy of a stage, the second half the other."""
    wanted = []
    for half in range(2):
        stages = make_stages(SHAPES["BatchNorm"], PP, "plain")
        for step in range(STEPS):
            x, y = (part.chunk(2)[half] for part in make_batch(MB, step))
            run_whole(stages, cut([(x, y)], MB // 2), square_loss)
        wanted.append(buffers_of(dict(enumerate(stages))))
    placement = schedule_of("dualpipe", PP, MB).placement
    for rank, buffers in enumerate(check(run_ranks(PP, run_batch_norm))):
        for chunk, number in enumerate(placement.stages[rank]):
            mine = {name: b for name, b in buffers.items() if name.startswith(f"{number}.")}
            assert mine
            assert worst(mine, wanted[placement.pipes[chunk]])[0] < 1e-10


# -- refusals ----------------------------------------------------------------------------------------------------------


class OwnForward(nn.Sequential):
    """A sequence that does more than its layers."""

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = super().forward(input) * 2  # type: ignore[no-untyped-call]
        return out


def layered_stages() -> list[nn.Module]:
    torch.manual_seed(5)
    with in_float64():
        return [nn.Sequential(linear(), Layer(linear())), nn.Sequential(Layer(linear()), linear())]


WHERE: dict[str, tuple[Callable[[Any], nn.Module], str]] = {
    "layer": (lambda stage: stage[0], "its module 0 (Layer)"),
    "sequence": (lambda stage: stage, "(Sequential)"),
}


class Hooked:
    """Stages of layers in segments, of which the last has something put on it that nothing would call."""

    def __init__(self, where: str, what: str) -> None:
        self.where, self.what = where, what

    def __call__(self, rank: int) -> Callable[[], object]:
        del rank
        stages, schedule, mesh = layered_stages(), schedule_of("1f1b", PP, MB), make_mesh(PP)
        if self.what == "class":
            stages[-1] = OwnForward(*cast(nn.Sequential, stages[-1]))
        else:
            CHANGES[self.what](WHERE[self.where][0](stages[-1]))
        return lambda: pipeline(schedule, stages, mesh, square_loss)


class AllHooked:
    """All of these, one after the other."""

    def __call__(self, rank: int) -> Callable[[], object]:
        def call() -> None:
            said = []
            for where in WHERE:
                for what in CHANGES:
                    with pytest.raises(ValueError, match="nothing calls") as refused:
                        Hooked(where, what)(rank)()
                    said.append(str(refused.value))
                    dist.barrier()
            with pytest.raises(ValueError, match="nothing calls") as refused:
                Hooked("", "class")(rank)()
            raise ValueError("\n".join([*said, str(refused.value)]))

        return call


def told(what: str) -> str:
    return "a forward that replaces its own" if what not in HOOKS else f"a {what}"


def test_what_segments_pass_by_is_refused_before_the_first_step() -> None:
    for said in refusals(PP, AllHooked()):
        lines = iter(said.splitlines())
        for _, named in WHERE.values():
            for what in CHANGES:
                line = next(lines)
                assert f"{named} has {told(what)}, which nothing calls" in line
                assert "Put hooks on modules that segments call" in line
        assert "is a OwnForward, whose own forward nothing calls" in next(lines)


def refused_later(rank: int) -> list[str]:
    """What is put on the last stage between steps is refused by the next, and what is taken off again is not."""
    schedule, said = schedule_of("1f1b", PP, MB), list[str]()
    cases = [(where, what) for where in WHERE for what in CHANGES]
    for where, what in [*cases, ("layer", "method")]:
        for kind in ("step", "evaluate") if what == "forward hook" else ("step",):
            stages, mesh = layered_stages(), make_mesh(PP)
            pipe = pipeline(schedule, stages, mesh, square_loss, deadline_s=PATIENT_S)
            batch = make_batch(MB, 0)
            pipe.step(*batch)
            on = WHERE[where][0](stages[-1])
            handle = on.register_forward_hook(lambda *_: None)
            handle.remove()
            pipe.step(*batch)
            if rank == PP - 1:
                setattr(on, "mlp", torch.tanh) if what == "method" else CHANGES[what](on)
            try:
                getattr(pipe, kind)(*batch)
                said.append("not refused")
            except (ValueError, treadle.RankLostError) as error:
                said.append(f"{type(error).__name__}: {error}")
            pipe.close()
    return said


@pytest.mark.slow
def test_what_segments_pass_by_is_refused_at_the_next_step() -> None:
    for rank, said in enumerate(check(run_ranks(PP, refused_later))):
        assert {line.split(":")[0] for line in said} == {"ValueError" if rank == PP - 1 else "RankLostError"}
        lines = iter(said)
        for _, named in WHERE.values():
            for what in CHANGES:
                for _ in range(2 if what == "forward hook" else 1):
                    assert f"{named} has {told(what)}, which nothing calls" in next(lines)
        (line,) = lines
        assert "stage 1, layer 0 (Layer) got another mlp after the Pipeline was made, which nothing calls" in line
        assert "make a new one after the change" in line


class Static(nn.Module):
    """Copies what comes into a buffer of its own, which the next micro-batch writes again."""

    def __init__(self, *, clones: bool = False) -> None:
        super().__init__()
        self.first, self.linear, self.clones = linear(), linear(), clones
        self.place = nn.Buffer(torch.zeros(2, 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mine = self.place.detach().copy_(self.first(x))
        out: Tensor = self.linear(mine.clone() if self.clones else mine)
        return out


class InSegments(Static):
    """The same as a layer in segments, whose MLP is the linear."""

    def segments(self) -> list[Segment]:
        return [
            compute("attn", self.first, reads="x", writes="h"),
            compute("mlp", self.mlp, reads="h", writes="x"),
        ]

    def mlp(self, h: Tensor) -> Tensor:
        mine = self.place.detach().copy_(h)
        out: Tensor = self.linear(mine.clone() if self.clones else mine)
        return out


class Changes(Layer):
    """Changes what it reads in place, which nothing else reads."""

    def mlp(self, h: Tensor) -> Tensor:
        return super().mlp(h.mul_(2.0))


WRITES: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "static": (Static, "zb-h1", "stage 1: the input of linear (Linear) for micro-batch"),
    "static, cloned": (lambda: Static(clones=True), "zb-h1", "not refused"),
    "static in segments": (lambda: nn.Sequential(InSegments()), "zb-h1", "the input of 0.linear (Linear) for"),
    "static in segments, cloned": (lambda: nn.Sequential(InSegments(clones=True)), "zb-h1", "not refused"),
    "static in segments, in time": (lambda: nn.Sequential(InSegments()), "dualpipev", "not refused"),
    "what a segment reads": (lambda: nn.Sequential(Changes(linear())), "dualpipev", "not refused"),
}


def written_stages(what: str) -> list[nn.Module]:
    make, name, _ = WRITES[what]
    num_stages = schedule_of(name, PP, MB).placement.num_stages
    torch.manual_seed(5)
    with in_float64():
        if what == "what a segment reads":
            return [make() for _ in range(num_stages)]
        layer: Callable[[], nn.Module] = (lambda: nn.Sequential(Layer(linear()))) if "segments" in what else linear
        return [*(layer() for _ in range(num_stages - 1)), make()]


def write(rank: int) -> list[tuple[str, float, Grads]]:
    del rank
    ran = []
    for what, (_, name, _) in WRITES.items():
        schedule, mesh, stages = schedule_of(name, PP, MB), make_mesh(PP), written_stages(what)
        pipe = pipeline(schedule, stages, mesh, square_loss, deadline_s=PATIENT_S)
        loss, said = 0.0, "not refused"
        try:
            loss = float(pipe.step(*make_batch(MB, 0)))
        except (ValueError, RuntimeError) as error:
            said = str(error)
        own = schedule.placement.stages[mesh.get_local_rank("pp")]
        ran.append((said, loss, grads_of({number: stages[number] for number in own})))
        pipe.close()
    return ran


@pytest.mark.slow
def test_what_is_written_to_before_it_is_used_is_refused_with_the_modules_name() -> None:
    for ran in check(run_ranks(PP, write)):
        for (what, (_, _, match)), (said, loss, grads) in zip(WRITES.items(), ran, strict=True):
            assert match in said, (what, said)
            if match == "not refused":
                stages = written_stages(what)
                losses = run_whole(stages, cut([make_batch(MB, 0)], MB), square_loss)
                assert loss == pytest.approx(sum(losses) / MB, rel=1e-10)
                assert worst(grads, grads_of(dict(enumerate(stages))))[0] < 1e-10


# -- two pipelines at once ---------------------------------------------------------------------------------------------


class Meets(nn.Module):
    """Waits in its forward until both threads are in theirs, or the other has ended."""

    def __init__(self, here: threading.Event, there: threading.Event) -> None:
        super().__init__()
        self.here, self.there = here, there

    def forward(self, x: Tensor) -> Tensor:
        self.here.set()
        assert self.there.wait(PATIENT_S)
        return x


def step_at_once(rank: int, seeds: tuple[int | None, int | None]) -> list[str]:
    """Two pipelines of one process, each in a thread of its own; the second steps while the first does."""
    del rank
    mesh = init_device_mesh(DEVICE_TYPE, (1,), mesh_dim_names=("pp",))
    schedule = schedule_of("1f1b", 1, MB)
    first, second = threading.Event(), threading.Event()
    said = ["", ""]
    pipes = []
    for seed, events in zip(seeds, ((first, second), (second, first)), strict=True):
        stage = nn.Sequential(linear(dtype=torch.float64), nn.Dropout(0.5), Meets(*events))
        pipes.append(close_at_end(treadle.Pipeline({0: stage}, schedule, mesh=mesh, loss_fn=square_loss, seed=seed)))

    def step(number: int) -> None:
        try:
            pipes[number].step(*make_batch(MB, 0))
            said[number] = "not refused"
        except ValueError as error:
            said[number] = str(error)
        finally:
            (first, second)[number].set()

    threads = [threading.Thread(target=step, args=(number,)) for number in range(2)]
    threads[0].start()
    assert first.wait(PATIENT_S)
    threads[1].start()
    for thread in threads:
        thread.join()
    pipes[1].step(*make_batch(MB, 0))
    return said


def all_at_once(rank: int) -> list[list[str]]:
    return [step_at_once(rank, seeds) for seeds in ((0, 0), (0, None), (None, 0), (None, None))]


def test_two_pipelines_that_would_seed_one_generator_at_once_are_refused() -> None:
    (ran,) = check(run_ranks(1, all_at_once))
    assert [first for first, _ in ran] == ["not refused"] * 4
    for _, second in ran[:3]:
        assert "another Pipeline of this process is in a step" in second
        assert "run one step after the other, or make both with seed=None" in second
    assert ran[3][1] == "not refused"
