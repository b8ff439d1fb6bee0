"""What a pipeline must not do without a word: gradients that are not those of one process, or a refusal by name.

Precisions and counts are those of real models: bfloat16 beside float32, micro-batches in numbers that are no powers of
two, auxiliary losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import treadle
from tests.support.cases import Grads, hold, own_grads, pipeline, schedule_of
from tests.support.oracle import Block, Embed, Head, cut, grads_of, make_batch, make_mesh, mean_loss, run_whole, worst
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from treadle.runtime.model.segments import Segment, compute

pytestmark = pytest.mark.slow

MOST_FLOAT32 = 2e-6
"""Sums of float32 in another order differ by less."""


class Dense(nn.Module):
    """A layer in segments, with an auxiliary loss in bfloat16."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def attn(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out

    def mlp(self, h: Tensor) -> tuple[Tensor, Tensor]:
        out: Tensor = h + self.down(functional.gelu(self.up(h)))
        return out, low_loss(out)

    def segments(self) -> list[Segment]:
        return [
            compute("attn", self.attn, reads="x", writes="h"),
            compute("mlp", self.mlp, reads="h", writes="x aux_loss"),
        ]

    def forward(self, x: Tensor) -> treadle.StageOutput:
        return treadle.StageOutput(*self.mlp(self.attn(x)))


def low_loss(out: Tensor) -> Tensor:
    return ((out**2).mean() / 3).to(torch.bfloat16)


class WithLowLoss(nn.Module):
    """A stage whose auxiliary loss is in bfloat16."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> treadle.StageOutput:
        out = self.stage(x)
        return treadle.StageOutput(out, low_loss(out))


def low_losses(num_stages: int, layered: bool) -> list[nn.Module]:
    torch.manual_seed(2)
    if layered:
        stages = [[Dense(8)] for _ in range(num_stages)]
        return [
            nn.Sequential(
                *([nn.Embedding(13, 8)] if at == 0 else []), *stage, *([Head(8)] if at == num_stages - 1 else [])
            )
            for at, stage in enumerate(stages)
        ]
    return [Embed(8), *(WithLowLoss(nn.Linear(8, 8)) for _ in range(num_stages - 2)), WithLowLoss(Head(8))]


def step_low_losses(rank: int, num_mb: int, dp: int, layered: bool) -> list[tuple[float, Grads]]:
    mesh, ran = make_mesh(2, dp), []
    for name in ("1f1b", "zb-v"):
        schedule = schedule_of(name, 2, num_mb)
        stages = low_losses(schedule.placement.num_stages, layered)
        pipe = pipeline(schedule, stages, mesh)
        loss = pipe.step(*make_batch(num_mb, rank % dp))
        ran.append((float(loss), own_grads(schedule, mesh, stages)))
        pipe.close()
    return ran


def whole_low_losses(stages: Sequence[nn.Module], microbatches: Sequence[tuple[Any, Any]]) -> tuple[float, Grads]:
    """The sum of all losses in float32, as none of them is rounded to another's precision."""
    total = 0.0
    for x, target in microbatches:
        aux = []
        for part in (part for stage in stages for part in (stage if isinstance(stage, nn.Sequential) else [stage])):
            x = part(x)
            if isinstance(x, treadle.StageOutput):
                assert x.aux_loss is not None
                aux.append(x.aux_loss.float())
                x = x.output
        loss = (mean_loss(x, target) + sum(aux)) / len(microbatches)
        torch.autograd.backward(loss)
        total += loss.item()
    return total, grads_of(dict(enumerate(stages)))


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize(("num_mb", "dp"), [(3, 1), (6, 1), (3, 2)])
def test_each_loss_is_scaled_in_its_own_precision(num_mb: int, dp: int, layered: bool) -> None:
    """1/3 and 1/6 have no end in binary: rounded to bfloat16 for one loss they are 0.2 % off for the next."""
    ranks = check(run_ranks(2 * dp, step_low_losses, num_mb, dp, layered))
    microbatches = cut([make_batch(num_mb, replica) for replica in range(dp)], num_mb)
    for place, num_stages in enumerate((2, 4)):
        wanted = whole_low_losses(low_losses(num_stages, layered), microbatches)
        hold([ran[place] for ran in ranks], wanted, MOST_FLOAT32, note=place)


# -- parameters that are changed after a pipeline was made -------------------------------------------------------------


def refused(rank: int, refuses: Sequence[int], call: Callable[[], object]) -> str:
    """What the call was refused with; ranks that are right themselves are told of one that is not."""
    error: Exception | None = None
    try:
        call()
    except (ValueError, treadle.RankLostError) as raised:
        error = raised
    if isinstance(error, treadle.RankLostError):
        assert rank not in refuses, error
        assert error.rank in refuses
        assert error.kind == "raised"
    elif error is not None:
        assert rank in refuses, error
    return str(error) if error is not None else "not refused"


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "unfrozen": (lambda m: m.linear.weight.requires_grad_(True), "linear.weight was unfrozen (requires_grad = True)"),
    "frozen": (lambda m: m.norm.weight.requires_grad_(False), "norm.weight was frozen (requires_grad = False)"),
    "replaced": (lambda m: setattr(m, "w", nn.Parameter(m.w.detach().clone())), "w was added or replaced"),
    "added": (lambda m: m.register_parameter("more", nn.Parameter(torch.ones(1))), "more was added or replaced"),
    "converted": (lambda m: m.norm.to(torch.bfloat16), "converted from torch.float64 to torch.bfloat16"),
    "module": (lambda m: m.add_module("late", nn.Linear(2, 2)), "a parameter or a module was added"),
}


def change_parameters(rank: int, what: str) -> str:
    """Four stages on two ranks and two replicas; in stage 1, on ranks 2 and 3, a parameter changes after a step."""
    mesh, schedule = make_mesh(2, 2), schedule_of("1f1b", 2, 4)
    block = Block(8, 8).double()
    stages = [Embed(8).double(), nn.Sequential(block, Head(8).double())]
    torch.manual_seed(1)
    for stage in stages:
        for p in stage.parameters():
            nn.init.normal_(p)
    block.linear.weight.requires_grad_(False)
    pipe = pipeline(schedule, stages, mesh, deadline_s=PATIENT_S)
    batch = make_batch(4, rank % 2)
    pipe.step(*batch)
    if rank >= 2:
        CHANGES[what][0](block)
    return refused(rank, (2, 3), lambda: pipe.step(*batch))


@pytest.mark.parametrize("what", CHANGES)
def test_parameters_changed_after_the_pipeline_was_made_are_refused(what: str) -> None:
    for said in check(run_ranks(4, change_parameters, what)):
        assert CHANGES[what][1] in said
        assert "make a new one" in said


# -- losses and inputs that would train nothing ------------------------------------------------------------------------

CUT_OFF: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "detached": (lambda o, t: mean_loss(o, t).detach(), "is cut off from the output"),
    "item": (lambda o, t: torch.tensor(mean_loss(o, t).item()), "is cut off from the output"),
    "integer": (lambda o, t: (o.argmax(-1) != t).sum(), "is torch.int64, which has no gradient"),
}


def cut_off_loss(rank: int, what: str, layered: bool, frozen: bool) -> str:
    schedule, mesh = schedule_of("1f1b", 2, 3), make_mesh(2)
    stages = low_losses(2, layered) if layered else [Embed(8), Head(8)]
    for stage in stages:
        stage.requires_grad_(not frozen)
    pipe = pipeline(schedule, stages, mesh, CUT_OFF[what][0], deadline_s=PATIENT_S)
    return refused(rank, (1,), lambda: pipe.step(*make_batch(3)))


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("what", CUT_OFF)
def test_a_loss_without_a_gradient_is_refused(what: str, layered: bool) -> None:
    for said in check(run_ranks(2, cut_off_loss, what, layered, False)):
        assert CUT_OFF[what][1] in said
        assert "evaluate()" in said


def test_a_loss_without_a_gradient_is_fine_where_nothing_trains() -> None:
    for layered in (False, True):
        assert check(run_ranks(2, cut_off_loss, "detached", layered, True)) == ["not refused"] * 2


def graph_in_inputs(rank: int, what: str) -> str:
    schedule, mesh = schedule_of("1f1b", 2, 3), make_mesh(2)
    stages = [nn.Linear(8, 8), nn.Linear(8, 8)]
    pipe = pipeline(schedule, stages, mesh, functional.mse_loss, deadline_s=PATIENT_S)
    outside = nn.Linear(8, 8)
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    if what == "inputs":
        return refused(rank, (0,), lambda: pipe.step(outside(x), y))
    if what == "tuples":
        return refused(rank, (0,), lambda: pipe.step([(outside(part),) for part in x.chunk(3)], y))
    if what == "leaf":
        return refused(rank, (0,), lambda: pipe.step(x.requires_grad_(), y))
    return refused(rank, (1,), lambda: pipe.step(x, outside(y)))


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("inputs", "inputs require a gradient (made by AddmmBackward0)"),
        ("tuples", "inputs require a gradient"),
        ("leaf", "inputs require a gradient (a leaf that requires one)"),
        ("targets", "targets require a gradient"),
    ],
)
def test_a_graph_behind_inputs_or_targets_is_refused(what: str, match: str) -> None:
    for said in check(run_ranks(2, graph_in_inputs, what)):
        assert match in said, said
        assert "part of the first or the last stage" in said


def step_without_gradients(rank: int) -> str:
    pipe = pipeline(schedule_of("1f1b", 2, 3), [Embed(8), Head(8)], make_mesh(2), deadline_s=PATIENT_S)
    with torch.no_grad():
        return refused(rank, (0, 1), lambda: pipe.step(*make_batch(3)))


def test_a_step_under_no_grad_is_refused() -> None:
    for said in check(run_ranks(2, step_without_gradients)):
        assert "use evaluate()" in said


# -- memory that is used again -----------------------------------------------------------------------------------------


class Reuses(nn.Module):
    """Returns a buffer of its own: a mask that is made anew for each micro-batch, or one that never changes."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(8, 8), writes
        self.mask = nn.Buffer(torch.ones(2, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.writes:
            self.mask.copy_(x > 0)
        return self.linear(x), self.mask


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.linear(x * mask)
        return out


LATER = """\
# treadle-schedule 1
# name: later
# placement: loop
# pp: 1
# vpp: 2
# microbatches: 2
0: F0.0 F1.0 F0.1 F1.1 B0.1 B0.0 B1.1 B1.0
"""
"""Both stages on one rank, the second some time after the first: nothing is sent."""


def reuse_schedule(name: str) -> treadle.Schedule:
    return treadle.loads(LATER) if name == "later" else schedule_of(name, 2, 6)


def reuse_memory(rank: int, name: str, writes: bool) -> tuple[str, Grads]:
    schedule, mesh = reuse_schedule(name), make_mesh(1 if name == "later" else 2)
    stages = reusing(writes)
    pipe = pipeline(schedule, stages, mesh, functional.mse_loss, deadline_s=PATIENT_S)
    x, y = reuse_batch(schedule)
    return refused(rank, (0,), lambda: pipe.step(x, y)), own_grads(schedule, mesh, stages)


def reusing(writes: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Reuses(writes), Masked()]


def reuse_batch(schedule: treadle.Schedule) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    size = 2 * schedule.num_microbatches
    return torch.randn(size, 8), torch.randn(size, 8)


@pytest.mark.parametrize(("name", "world"), [("gpipe", 2), ("later", 1)])
def test_an_output_whose_memory_is_used_again_is_refused(name: str, world: int) -> None:
    for said, _ in check(run_ranks(world, reuse_memory, name, True)):
        assert "the output of stage 0 for micro-batch" in said, said
        assert "was written to before it was sent on or read" in said


@pytest.mark.parametrize(("name", "world"), [("gpipe", 2), ("later", 1)])
def test_an_output_that_stays_as_it_is_may_be_shared(name: str, world: int) -> None:
    schedule, stages = reuse_schedule(name), reusing(False)
    run_whole(stages, cut([reuse_batch(schedule)], schedule.num_microbatches), functional.mse_loss)
    wanted = grads_of(dict(enumerate(stages)))
    for said, grads in check(run_ranks(world, reuse_memory, name, False)):
        assert said == "not refused"
        assert worst(grads, wanted)[0] < MOST_FLOAT32


# -- precision and gradients as torch has them -------------------------------------------------------------------------


class Lowered(nn.Module):
    """A float32 linear that is given bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.to(torch.bfloat16))
        return out.float()


def mixed_precision(rank: int, name: str) -> str:
    schedule, mesh = schedule_of(name, 2, 6), make_mesh(2)
    stages = [Lowered(), *(nn.Linear(8, 8) for _ in range(schedule.placement.num_stages - 1))]
    pipe = pipeline(schedule, stages, mesh, functional.mse_loss, deadline_s=PATIENT_S)
    try:
        pipe.step(torch.randn(12, 8), torch.randn(12, 8))
    except RuntimeError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_linear_given_another_precision_raises_as_torch_does(name: str) -> None:
    with pytest.raises(RuntimeError) as torchs:
        Lowered()(torch.randn(12, 8))
    for said in check(run_ranks(2, mixed_precision, name)):
        assert str(torchs.value) in said


class TwoOutputs(nn.Module):
    """Its second output has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.extra, self.scale = nn.Linear(8, 8), nn.Linear(8, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.extra(x) * self.scale


class ReadsSome(nn.Module):
    """Reads its second input where `reads` says so, by micro-batch."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.linear, self.reads, self.turn = nn.Linear(8, 8), reads, 0

    def forward(self, x: Tensor, extra: Tensor) -> Tensor:
        self.turn += 1
        out: Tensor = self.linear(x)
        if (
            self.reads == "always"
            or (self.reads == "first" and self.turn == 1)
            or (self.reads == "later" and self.turn > 1)
        ):
            out = out + extra.sum()
        return out


def two_outputs(num_stages: int, reads: str) -> list[nn.Module]:
    torch.manual_seed(4)
    return [*(TwoOutputs() for _ in range(num_stages - 1)), ReadsSome(reads)]


def unread_outputs(rank: int, name: str, dp: int, reads: str) -> tuple[str, Grads]:
    schedule, mesh = schedule_of(name, 2, 6), make_mesh(2, dp)
    stages = two_outputs(schedule.placement.num_stages, reads)
    pipe = pipeline(schedule, stages, mesh, functional.mse_loss, deadline_s=PATIENT_S)
    torch.manual_seed(rank % dp)
    x, y = torch.randn(12, 8), torch.randn(12, 8)
    said = refused(rank, tuple(range(dp, 2 * dp)), lambda: pipe.step(x, y))
    return said, own_grads(schedule, mesh, stages)


@pytest.mark.parametrize("reads", ["never", "first", "always"])
@pytest.mark.parametrize(("name", "dp"), [("1f1b", 1), ("zb-v", 1), ("1f1b", 2)])
def test_what_feeds_only_an_output_that_nobody_reads_has_no_gradient(name: str, dp: int, reads: str) -> None:
    batches = []
    for replica in range(dp):
        torch.manual_seed(replica)
        batches.append((torch.randn(12, 8), torch.randn(12, 8)))
    num_stages = 4 if name == "zb-v" else 2
    stages = two_outputs(num_stages, reads)
    for batch in batches:
        for stage in stages:
            vars(stage)["turn"] = 0
        run_whole(stages, cut([batch], 6), functional.mse_loss, num_tokens=6 * dp)
    wanted = grads_of(dict(enumerate(stages)))
    assert (wanted[f"{num_stages - 2}.scale"] is None) == (reads == "never")
    for said, grads in check(run_ranks(2 * dp, unread_outputs, name, dp, reads)):
        assert said == "not refused"
        difference, where = worst(grads, wanted)
        assert difference < MOST_FLOAT32, where


def test_an_input_that_only_later_micro_batches_use_is_refused() -> None:
    for said, _ in check(run_ranks(2, unread_outputs, "1f1b", 1, "later")):
        assert "stage 1 used its input 1 in micro-batch 1, but not in the first" in said


class Penalised(nn.Module):
    """Its auxiliary loss is the gradient of its output by its input: it is differentiated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> treadle.StageOutput:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            out = self.second(torch.tanh(self.first(x)))
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return treadle.StageOutput(out, (slope**2).mean())


def put_hooks(stages: Sequence[nn.Module]) -> None:
    for stage in stages:
        assert isinstance(stage, nn.Linear)
        stage.weight.register_hook(lambda grad: grad * 0.5)  # type: ignore[no-untyped-call]

        def halve(param: Tensor) -> None:
            assert param.grad is not None, "there is nothing to see"
            if param.dtype is not torch.bfloat16:  # of these it sees each micro-batch's, not their sum
                param.grad.mul_(0.5)

        stage.bias.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]


def step_unusual(rank: int, what: str) -> list[tuple[float, Grads]]:
    del rank
    mesh, ran = make_mesh(2), []
    for name in ("1f1b", "zb-v"):
        schedule = schedule_of(name, 2, 3)
        stages, x, y, loss_fn = unusual(what, schedule.placement.num_stages, schedule.num_microbatches)
        pipe = pipeline(schedule, stages, mesh, loss_fn, deadline_s=PATIENT_S)
        if what.startswith("hooks"):
            put_hooks(stages)
        loss = pipe.step(x, None if what == "no targets" else y)
        ran.append((float(loss), own_grads(schedule, mesh, stages)))
        pipe.close()
    return ran


def unusual(what: str, num_stages: int, num_mb: int) -> tuple[list[nn.Module], Tensor, Tensor, Any]:
    torch.manual_seed(3)
    dtype = torch.bfloat16 if what == "hooks, bfloat16" else torch.float64
    stages = [nn.Linear(8, 8) if what != "twice" else Penalised() for _ in range(num_stages)]
    x, y = torch.randn(2 * num_mb, 8), torch.randn(2 * num_mb, 8)
    return [stage.to(dtype) for stage in stages], x.to(dtype), y.to(dtype), square if what == "no targets" else near


def square(output: Tensor, target: object) -> Tensor:
    assert target is None or isinstance(target, Tensor)
    return (output.float() ** 2).mean()


def near(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.float(), target.float())


@pytest.mark.parametrize("what", ["twice", "hooks", "hooks, bfloat16", "no targets"])
def test_what_works_in_one_process_works_under_all_schedules(what: str) -> None:
    """Gradients of gradients; hooks put on after the pipeline was made; no targets."""
    ranks = check(run_ranks(2, step_unusual, what))
    for place, num_stages in enumerate((2, 4)):
        stages, x, y, loss_fn = unusual(what, num_stages, 3)
        if what.startswith("hooks"):
            put_hooks(stages)
        losses = run_whole(stages, cut([(x, y)], 3), loss_fn)
        wanted = sum(losses) / len(losses), grads_of(dict(enumerate(stages)))
        hold([ran[place] for ran in ranks], wanted, 0.01 if "bfloat16" in what else MOST_FLOAT32, note=what)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.mul_(2.0))
        return out


class Packs(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: Tensor) -> Any:
        out = self.linear(x)
        return [out, out] if self.kind == "list" else {"out": out}


def refused_stage(rank: int, what: str) -> str:
    stages = [nn.Linear(8, 8), InPlace()] if what == "in place" else [Packs(what), nn.Linear(8, 8)]
    pipe = pipeline(schedule_of("1f1b", 2, 3), stages, make_mesh(2), functional.mse_loss, deadline_s=PATIENT_S)
    guilty = (1,) if what == "in place" else (0,)
    return refused(rank, guilty, lambda: pipe.step(torch.randn(6, 8), torch.randn(6, 8)))


@pytest.mark.parametrize(
    ("what", "match", "way_out"),
    [
        ("in place", "stage 1 changes its input in place", "x = x + y for x += y"),
        ("list", "stage 0 returned list", "return tuple(...) for a list"),
        ("dict", "stage 0 returned dict", "tuple(....values()) for a dict"),
    ],
)
def test_what_a_stage_may_not_do_is_refused_with_the_way_out(what: str, match: str, way_out: str) -> None:
    for said in check(run_ranks(2, refused_stage, what)):
        assert match in said
        assert way_out in said


def forgotten(rank: int, what: str) -> str:
    pipe = pipeline(schedule_of("1f1b", 2, 3), [Embed(8), Head(8)], make_mesh(2), deadline_s=PATIENT_S)
    inputs, targets = make_batch(3)
    if what == "inputs":
        return refused(rank, (0,), lambda: pipe.step(None, targets))
    return refused(rank, (1,), lambda: pipe.step(inputs))


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("inputs", "inputs are a tensor, or a list with one entry a micro-batch, got NoneType"),
        ("targets", "loss_fn cannot do without targets"),
    ],
)
def test_a_batch_that_was_forgotten_is_asked_for(what: str, match: str) -> None:
    for said in check(run_ranks(2, forgotten, what)):
        assert match in said
