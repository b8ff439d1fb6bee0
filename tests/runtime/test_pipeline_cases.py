"""What a pipeline must get right, or refuse by name, at its edges: sharing, precision, randomness, mistakes.

Gradients are held to the whole model in one process. A refusal is a ValueError on every rank, soon.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import treadle
from tests.support.devices import DEVICE_TYPE
from tests.support.oracle import (
    VOCAB,
    Bare,
    Block,
    Embed,
    Head,
    chunks_of,
    cut,
    grads_of,
    make_batch,
    make_mesh,
    make_stages,
    mean_loss,
    run_whole,
    sum_loss,
    worst,
)
from tests.support.ranks import Outcome, check, run_ranks
from treadle.ir.program import LaneKind, OpKind
from treadle.runtime.model.seeding import seed_layer
from treadle.schedules import SCHEDULES, Size

MOST_DIFFERENCE = 1e-10

Grads = dict[str, Tensor | None]
Make = Callable[[], list[nn.Module]]


# -- what the tests share ----------------------------------------------------------------------------------------------


def schedule_of(name: str, pp: int, num_mb: int, vpp: int | None = None) -> treadle.Schedule:
    return treadle.generate(name, pp=pp, vpp=vpp, microbatches=num_mb)


def replica_of(mesh: DeviceMesh) -> int:
    names = mesh.mesh_dim_names
    return mesh.get_local_rank("dp") if names is not None and "dp" in names else 0


def pipeline(
    schedule: treadle.Schedule, stages: Sequence[nn.Module], mesh: DeviceMesh, loss_fn: Any = mean_loss, **more: Any
) -> treadle.Pipeline:
    own = chunks_of(schedule, mesh.get_local_rank("pp"), stages)
    return treadle.Pipeline(own, schedule, mesh=mesh, loss_fn=loss_fn, **more)


def own_grads(schedule: treadle.Schedule, mesh: DeviceMesh, stages: Sequence[nn.Module]) -> Grads:
    return grads_of({number: stages[number] for number in schedule.placement.stages[mesh.get_local_rank("pp")]})


def step_once(rank: int, name: str, num_mb: int, dp: int, make: Make, loss_fn: Any) -> tuple[float, Grads]:
    """A step of a schedule on two pipeline ranks, with the batch of `make_batch`."""
    del rank
    schedule, mesh = schedule_of(name, 2, num_mb), make_mesh(2, dp)
    stages = make()
    pipe = pipeline(schedule, stages, mesh, loss_fn)
    loss = pipe.step(*make_batch(num_mb, replica_of(mesh)))
    return float(loss), own_grads(schedule, mesh, stages)


def whole_once(make: Make, num_mb: int, dp: int, loss_fn: Any = mean_loss) -> tuple[float, Grads]:
    stages = make()
    losses = run_whole(stages, cut([make_batch(num_mb, replica) for replica in range(dp)], num_mb), loss_fn)
    return sum(losses) / len(losses), grads_of(dict(enumerate(stages)))


def hold(
    ranks: Sequence[tuple[float, Grads]], wanted: tuple[float, Grads], most: float = MOST_DIFFERENCE, note: object = ""
) -> None:
    """All ranks have the loss, and the gradients of their stages."""
    for rank, (loss, grads) in enumerate(ranks):
        assert loss == pytest.approx(wanted[0], rel=most), (note, rank)
        difference, where = worst(grads, wanted[1])
        assert difference <= most, f"{note} rank {rank}: {where} differs by {difference}"


def refusal(call: Callable[[], object]) -> str:
    """What a call was refused with, after which the rank goes on."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "not refused"


def all_refuse(rank: int, make: Callable[[int], Callable[[], object]]) -> tuple[str, float]:
    """The refusal on this rank and how long it took. No rank leaves before all have theirs."""
    call = make(rank)
    begin_s = time.monotonic()
    said = refusal(call)
    took_s = time.monotonic() - begin_s
    dist.barrier()
    return said, took_s


def refusals(world: int, make: Callable[[int], Callable[[], object]]) -> list[str]:
    """What each rank says; nobody waits for a rank that has refused."""
    told = check(run_ranks(world, all_refuse, make, timeout_s=20))
    assert all(took_s < 10 for _, took_s in told), told
    return [said for said, _ in told]


def nearest(name: str, pp: int, num_mb: int, vpp: int | None = None) -> treadle.Schedule | None:
    """The schedule in exactly this number of micro-batches, if it has such a size."""
    family = SCHEDULES[name]
    size = family.nearest(Size(pp, vpp if vpp is not None else family.default_vpp, num_mb))
    if size is None or (size.pp, size.microbatches) != (pp, num_mb):
        return None
    return family.generate(size)


# -- parameters that are shared, or not used ---------------------------------------------------------------------------


class TiedWithin(nn.Module):
    """Two linears and a product share one weight; two linears share a bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)
        self.second.weight = self.first.weight
        self.second.bias = self.first.bias
        self.w = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x)))) @ self.w


def tied_within() -> list[nn.Module]:
    torch.manual_seed(3)
    head = nn.Sequential(TiedWithin(8), Head(8))
    return [nn.Sequential(Embed(8), TiedWithin(8)).double(), head.double()]


def tied_ends(num_stages: int) -> list[nn.Module]:
    """The head's weight is the embedding's: in a V, and in dualpipe, both are on one rank."""
    torch.manual_seed(4)
    embed, head = Embed(8), Head(8)
    middle = [Block(8, 6), Block(6, 8)] if num_stages == 4 else []
    stages = [embed.double(), *(block.double() for block in middle), head.double()]
    head.linear.weight = embed.table.weight
    return stages


def tied_ends_two() -> list[nn.Module]:
    return tied_ends(2)


def tied_ends_four() -> list[nn.Module]:
    return tied_ends(4)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_parameters_tied_within_a_stage(name: str, dp: int) -> None:
    ranks = check(run_ranks(2 * dp, step_once, name, 4, dp, tied_within, mean_loss))
    hold(ranks, whole_once(tied_within, 4, dp))


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("name", ["zb-v", "dualpipev", "dualpipe"])
def test_a_parameter_that_two_chunks_of_a_rank_share(name: str, dp: int) -> None:
    make = tied_ends_two if name == "dualpipe" else tied_ends_four
    ranks = check(run_ranks(2 * dp, step_once, name, 6, dp, make, mean_loss))
    wanted = whole_once(make, 6, dp)
    assert torch.equal(wanted[1]["0.table.weight"], wanted[1][f"{1 if name == 'dualpipe' else 3}.linear.weight"])  # type: ignore[arg-type]
    hold(ranks, wanted)


class Sometimes(nn.Module):
    """A linear that is never used, and one that is used if `use` says so."""

    def __init__(self, use: bool) -> None:
        super().__init__()
        self.never, self.sometimes = nn.Linear(8, 8), nn.Linear(8, 8)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.sometimes(x)) if self.use else x


def sometimes(use: bool) -> list[nn.Module]:
    torch.manual_seed(5)
    stages = [nn.Sequential(Embed(8), Sometimes(use)), nn.Sequential(Sometimes(use), Head(8))]
    return [stage.double() for stage in stages]


def step_sometimes(rank: int, name: str, dp: int, users: Sequence[int]) -> tuple[float, Grads]:
    mesh = make_mesh(2, dp)
    return step_once(rank, name, 4, dp, lambda: sometimes(replica_of(mesh) in users), mean_loss)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe"])
@pytest.mark.parametrize(("dp", "users"), [(1, ()), (1, (0,)), (2, ()), (2, (1,))])
def test_parameters_that_nobody_used_have_no_gradient(name: str, dp: int, users: tuple[int, ...]) -> None:
    stages, others = sometimes(True), sometimes(False)
    for mine, other in zip(stages, others, strict=True):  # one set of parameters, two ways to use it
        for part, twin in zip(other.modules(), mine.modules(), strict=True):
            part._parameters = twin._parameters
    losses = []
    for replica in range(dp):
        chosen = stages if replica in users else others
        losses += run_whole(chosen, cut([make_batch(4, replica)], 4), mean_loss, num_tokens=4 * dp)
    wanted = grads_of(dict(enumerate(stages)))
    assert wanted["0.1.never.weight"] is None
    assert (wanted["0.1.sometimes.weight"] is None) == (not users)
    ranks = check(run_ranks(2 * dp, step_sometimes, name, dp, users))
    hold(ranks, (sum(losses) / len(losses), wanted))


def sparse_embedding() -> list[nn.Module]:
    first, last = make_stages(2)
    assert isinstance(first, Embed)
    first.table.sparse = True
    return [first, last]


class Empty(nn.Module):
    """A stage with a parameter that has no elements, and one that has no dimensions."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self.none, self.one = nn.Parameter(torch.zeros(0, 4).double()), nn.Parameter(torch.ones(()).double())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.stage(x) * self.one + self.none.sum()
        return out


def empty_parameter() -> list[nn.Module]:
    return [Empty(stage) for stage in make_stages(2)]


def weight_normed() -> list[nn.Module]:
    """The linear's weight is no parameter, but made of two before each forward."""
    stages = make_stages(2)
    for stage in stages:
        nn.utils.weight_norm(cast(nn.Linear, stage.linear))
    return stages


def pruned() -> list[nn.Module]:
    """The linear's weight is no parameter, but made of one and a mask before each forward."""
    stages = make_stages(2)
    for stage in stages:
        prune.l1_unstructured(stage.linear, "weight", 0.5)  # type: ignore[no-untyped-call]
    return stages


def hooked() -> list[nn.Module]:
    """A hook changes each gradient of a linear's weight."""
    stages = make_stages(2)
    for stage in stages:
        cast(nn.Linear, stage.linear).weight.register_hook(lambda grad: grad * 0.5)  # type: ignore[no-untyped-call]
    return stages


def hooked_after() -> list[nn.Module]:
    """A hook changes `.grad` of a linear's weight each time something was added to it."""

    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    stages = make_stages(2)
    for stage in stages:
        weight = cast(nn.Linear, stage.linear).weight
        weight.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]
    return stages


UNUSUAL = {
    "sparse": sparse_embedding,
    "empty": empty_parameter,
    "weight norm": weight_normed,
    "pruned": pruned,
    "hooked": hooked,
    "hooked after": hooked_after,
}


def step_unusual(rank: int, what: str, dp: int) -> list[tuple[float, Grads]]:
    return [step_once(rank, name, 4, dp, UNUSUAL[what], mean_loss) for name in ("1f1b", "zb-h1")]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("what", ["empty", "weight norm", "pruned", "hooked", "hooked after"])
def test_unusual_parameters(what: str, dp: int) -> None:
    if what == "hooked after" and dp > 1:
        pytest.skip("what such a hook sees of several replicas is not said anywhere")
    wanted = whole_once(UNUSUAL[what], 4, dp)
    ranks = check(run_ranks(2 * dp, step_unusual, what, dp))
    for place, name in enumerate(("1f1b", "zb-h1")):
        hold([ran[place] for ran in ranks], wanted, note=name)


@pytest.mark.parametrize("dp", [1, 2])
def test_sparse_gradients_are_right_or_refused(dp: int) -> None:
    outcomes = run_ranks(2 * dp, step_unusual, "sparse", dp, timeout_s=40)
    if all(outcome.ok for outcome in outcomes):
        loss, grads = whole_once(sparse_embedding, 4, dp)
        wanted = loss, {name: g.to_dense() if g is not None else None for name, g in grads.items()}
        for ran in check(outcomes):
            for loss, grads in ran:
                hold([(loss, {name: g.to_dense() if g is not None else None for name, g in grads.items()})], wanted)
        return
    errors = [outcome.error for outcome in outcomes]
    assert any(e is not None and e.type == "ValueError" and "sparse" in e.message for e in errors), errors


# -- what crosses between stages ---------------------------------------------------------------------------------------


class Many(nn.Module):
    """Passes on seven tensors: some get gradients, some are integers or flags, some are of no use to the next stage."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 6) if first else None
        self.linear, self.other = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, tokens: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        if self.table is not None:
            x: Tensor = self.table(tokens)
            y, mask, scale = self.other(x), tokens % 2 == 0, torch.linspace(0.5, 1.5, 6, dtype=x.dtype)
        else:
            x, y, mask, scale = rest[:4]
            y = y + self.other(x)
        x = x + torch.tanh(self.linear(x * scale)) * mask[..., None]
        return tokens, x, y, mask, scale, x * 2.0, tokens.to(torch.int32).t()


class ManyHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, VOCAB)

    def forward(self, tokens: Tensor, x: Tensor, y: Tensor, mask: Tensor, scale: Tensor, *rest: Tensor) -> Tensor:
        assert mask.dtype is torch.bool
        assert rest[1].dtype is torch.int32
        assert torch.equal(rest[1].t().long(), tokens)
        assert not scale.requires_grad
        out: Tensor = self.linear(torch.cat([x * (tokens[..., None] + 1), y], dim=-1))
        return out


def many(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(6)
    stages = [*(Many(i == 0) for i in range(num_stages - 1)), ManyHead()]
    return [stage.double() for stage in stages]


def step_many(rank: int, pp: int, num_mb: int) -> list[tuple[str, float, Grads]]:
    del rank
    mesh, ran = make_mesh(pp), []
    for name in SCHEDULES:
        schedule = nearest(name, pp, num_mb)
        assert schedule is not None
        stages = many(schedule.placement.num_stages)
        pipe = pipeline(schedule, stages, mesh)
        for _ in range(2):  # the second time without headers
            loss = pipe.step(*make_batch(num_mb))
        ran.append((name, float(loss), own_grads(schedule, mesh, stages)))
        pipe.close()
    return ran


@pytest.mark.parametrize("pp", [2, 4])
def test_several_tensors_between_stages(pp: int) -> None:
    num_mb = 2 * pp
    ranks = check(run_ranks(pp, step_many, pp, num_mb))
    for place, name in enumerate(SCHEDULES):
        schedule = nearest(name, pp, num_mb)
        assert schedule is not None
        stages = many(schedule.placement.num_stages)
        for _ in range(2):
            losses = run_whole(stages, cut([make_batch(num_mb)], num_mb), mean_loss)
        wanted = sum(losses) / num_mb, grads_of(dict(enumerate(stages)))
        hold([(loss, grads) for _, loss, grads in (ran[place] for ran in ranks)], wanted, note=name)


class Extra(nn.Module):
    """The first stage with one more output, of the kind that `what` says."""

    def __init__(self, stage: nn.Module, what: str) -> None:
        super().__init__()
        self.stage, self.what = stage, what

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        x: Tensor = self.stage(tokens)
        kinds: dict[str, Callable[[], tuple[Tensor, ...]]] = {
            "no elements": lambda: (x, x[:0]),
            "no dimensions": lambda: (x, x.sum()),
            "the same again": lambda: (x, x),
            "its input": lambda: (x, tokens),
            "expanded": lambda: (x, x[:, :1].expand_as(x)),
            "transposed": lambda: (x, x.transpose(0, 1)),
            "complex": lambda: (x, x.to(torch.complex128)),
            "17 tensors": lambda: (x,) * 17,
            "9 dimensions": lambda: (x, x.reshape(1, 1, 1, 1, 1, 1, *x.shape)),
        }
        return kinds[self.what]()


class Takes(nn.Module):
    """The last stage, which adds the mean of what else comes."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        out: Tensor = self.stage(x)
        return out * (1 + sum(t.sin().mean() for t in rest if t.is_floating_point() and t.numel() > 0))


def step_extra(rank: int, listed: Sequence[str]) -> list[tuple[float, Grads]]:
    def make(what: str) -> list[nn.Module]:
        first, last = make_stages(2)
        return [Extra(first, what), Takes(last)]

    return [step_once(rank, "zb-h1", 4, 1, lambda what=what: make(what), mean_loss) for what in listed]  # type: ignore[misc]


def test_all_kinds_of_tensors_between_stages() -> None:
    listed = ["no elements", "no dimensions", "the same again", "its input", "expanded", "transposed"]
    ranks = check(run_ranks(2, step_extra, listed))
    for place, what in enumerate(listed):
        first, last = make_stages(2)
        stages = [Extra(first, what), Takes(last)]
        losses = run_whole(stages, cut([make_batch(4)], 4), mean_loss)
        hold([ran[place] for ran in ranks], (sum(losses) / 4, grads_of(dict(enumerate(stages)))), note=what)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("complex", "stage 0 returns torch.complex128, which cannot be sent; use one of float32"),
        ("17 tensors", "stage 0 returns 17 tensors; 16 is the most"),
        ("9 dimensions", "stage 0 returns a tensor of 9 dimensions; 8 is the most"),
    ],
)
def test_tensors_that_cannot_be_sent_are_refused(what: str, match: str) -> None:
    ended_soon(run_ranks(2, step_extra, [what], timeout_s=40), 0, match)


class WithAux(nn.Module):
    """A stage with an auxiliary loss; the first has none."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> treadle.StageOutput:
        out = self.stage(x)
        return treadle.StageOutput(out, 0.01 * (out**2).mean())


def with_aux(num_stages: int) -> list[nn.Module]:
    first, *rest = make_stages(num_stages)
    return [first, *map(WithAux, rest)]


def step_aux(rank: int, dp: int, num_tokens: float | None) -> list[tuple[float, Grads, list[float]]]:
    del rank
    mesh, ran = make_mesh(2, dp), []
    for name in SCHEDULES:
        schedule = nearest(name, 2, 4)
        assert schedule is not None
        stages = with_aux(schedule.placement.num_stages)
        pipe = pipeline(schedule, stages, mesh, sum_loss if num_tokens is not None else mean_loss)
        loss = pipe.step(*make_batch(4, replica_of(mesh)), num_tokens=num_tokens)
        assert pipe.report is not None
        ran.append((float(loss), own_grads(schedule, mesh, stages), pipe.report.losses.tolist()))
        pipe.close()
    return ran


@pytest.mark.parametrize(("dp", "num_tokens"), [(1, None), (2, None), (1, 23.0), (2, 48.0)])
def test_auxiliary_losses_and_sums_over_tokens(dp: int, num_tokens: float | None) -> None:
    ranks = check(run_ranks(2 * dp, step_aux, dp, num_tokens))
    loss_fn = sum_loss if num_tokens is not None else mean_loss
    for place, name in enumerate(SCHEDULES):
        schedule = nearest(name, 2, 4)
        assert schedule is not None
        stages = with_aux(schedule.placement.num_stages)
        losses = run_whole(stages, cut([make_batch(4, r) for r in range(dp)], 4), loss_fn, num_tokens=num_tokens)
        scale = num_tokens if num_tokens is not None else len(losses)
        wanted = sum(losses) / scale, grads_of(dict(enumerate(stages)))
        hold([ran[place][:2] for ran in ranks], wanted, note=name)
        for rank, ran in enumerate(ranks):
            own = losses[4 * (rank % dp) :][:4]
            assert ran[place][2] == pytest.approx(own, rel=MOST_DIFFERENCE), (name, rank)


def different_num_tokens(rank: int) -> tuple[str, str]:
    schedule, mesh = schedule_of("1f1b", 2, 4), make_mesh(2)
    pipe = pipeline(schedule, make_stages(2), mesh, sum_loss)
    inputs, targets = make_batch(4)
    apart = refusal(lambda: pipe.step(inputs, targets, num_tokens=24 + rank))
    half = refusal(lambda: pipe.step(inputs, targets, num_tokens=24 if rank else None))
    return apart, half


def test_different_num_tokens_are_refused() -> None:
    for said in check(run_ranks(2, different_num_tokens)):
        for text in said:
            assert "different num_tokens" in text
            assert "same on every rank" in text


# -- steps that add up -------------------------------------------------------------------------------------------------


def accumulate(rank: int, name: str, dp: int, reduces: Sequence[bool]) -> tuple[float, Grads, list[bool]]:
    del rank
    schedule, mesh = schedule_of(name, 2, 4), make_mesh(2, dp)
    stages = make_stages(schedule.placement.num_stages)
    pipe = pipeline(schedule, stages, mesh)
    reduced = []
    for seed, reduce in enumerate(reduces):
        loss = pipe.step(*make_batch(4, replica_of(mesh), seed=seed), reduce=reduce)
        assert pipe.report is not None
        reduced.append(pipe.report.reduced)
    return float(loss), own_grads(schedule, mesh, stages), reduced


@pytest.mark.parametrize("reduces", [(True, True, True), (False, True), (False, False, True)])
@pytest.mark.parametrize(("name", "dp"), [("1f1b", 1), ("zb-v", 2), ("dualpipe", 1), ("dualpipe", 2)])
def test_steps_add_up(name: str, dp: int, reduces: tuple[bool, ...]) -> None:
    stages = make_stages(schedule_of(name, 2, 4).placement.num_stages)
    for seed in range(len(reduces)):
        losses = run_whole(stages, cut([make_batch(4, replica, seed=seed) for replica in range(dp)], 4), mean_loss)
    wanted = sum(losses) / len(losses), grads_of(dict(enumerate(stages)))
    ranks = check(run_ranks(2 * dp, accumulate, name, dp, reduces))
    hold([ran[:2] for ran in ranks], wanted)
    alone = name != "dualpipe" and dp == 1  # then there is nothing to reduce
    assert all(reduced == [alone or reduce for reduce in reduces] for _, _, reduced in ranks)


def local_after_reduced(rank: int) -> tuple[str, Grads, Grads]:
    del rank
    schedule, mesh = schedule_of("1f1b", 2, 4), make_mesh(2, 2)
    stages = make_stages(2)
    pipe = pipeline(schedule, stages, mesh)
    batch = make_batch(4, replica_of(mesh))
    pipe.step(*batch)
    first = own_grads(schedule, mesh, stages)
    said = refusal(lambda: pipe.step(*batch, reduce=False))
    for stage in stages:
        stage.zero_grad()
    pipe.step(*batch, reduce=False)
    pipe.step(*batch)
    return said, first, own_grads(schedule, mesh, stages)


def test_a_local_step_after_a_reduced_one_is_refused() -> None:
    for said, once, twice in check(run_ranks(4, local_after_reduced)):
        assert "step(reduce=False) after a reduced step" in said
        assert "set the gradients to None first" in said
        assert worst(twice, {name: None if g is None else 2 * g for name, g in once.items()})[0] <= MOST_DIFFERENCE


def train(rank: int, name: str, dp: int) -> tuple[list[float], Grads]:
    """Losses of three steps with an optimizer, and the parameters after them."""
    del rank
    schedule, mesh = schedule_of(name, 2, 4), make_mesh(2, dp)
    stages = make_stages(schedule.placement.num_stages)
    own = {number: stages[number] for number in schedule.placement.stages[mesh.get_local_rank("pp")]}
    optimizer = torch.optim.AdamW([p for stage in own.values() for p in stage.parameters()], lr=0.1)
    pipe = pipeline(schedule, stages, mesh)
    losses = []
    for seed in range(3):
        losses.append(float(pipe.step(*make_batch(4, replica_of(mesh), seed=seed))))
        optimizer.step()
        optimizer.zero_grad(set_to_none=seed > 0)
    return losses, values_of(own)


def values_of(stages: Mapping[int, nn.Module]) -> Grads:
    return {f"{s}.{name}": p.detach().clone() for s, stage in stages.items() for name, p in stage.named_parameters()}


@pytest.mark.parametrize(("name", "dp"), [("1f1b", 1), ("zb-v", 2), ("dualpipe", 2)])
def test_training_goes_the_same_way(name: str, dp: int) -> None:
    stages = make_stages(schedule_of(name, 2, 4).placement.num_stages)
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=0.1)
    wanted = []
    for seed in range(3):
        losses = run_whole(stages, cut([make_batch(4, replica, seed=seed) for replica in range(dp)], 4), mean_loss)
        wanted.append(sum(losses) / len(losses))
        optimizer.step()
        optimizer.zero_grad()
    for losses, values in check(run_ranks(2 * dp, train, name, dp)):
        assert losses == pytest.approx(wanted, rel=1e-8)
        assert worst(values, values_of(dict(enumerate(stages))))[0] <= 1e-6  # Adam divides by what may be small


# -- precision ---------------------------------------------------------------------------------------------------------

NUM_LOW = 300
"""Micro-batches that are too many for a sum in bfloat16: 256 + 1 is 256 there."""


class Low(nn.Module):
    """A linear, a norm and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(torch.tanh(self.linear(x)) @ self.w) + x
        return out


def low_stages() -> list[nn.Module]:
    torch.manual_seed(8)
    return [Low().bfloat16() for _ in range(2)]


def low_batch(replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(replica)
    x = 1.0 + 0.1 * torch.randn(NUM_LOW * 2, 4, generator=generator)
    return x.bfloat16(), torch.zeros(NUM_LOW * 2, 4, dtype=torch.bfloat16)


def square_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).double().square().mean()


def step_low(rank: int, name: str, dp: int, reduces: Sequence[bool]) -> tuple[float, Grads, list[bool]]:
    del rank
    schedule, mesh = schedule_of(name, 2, NUM_LOW), make_mesh(2, dp)
    stages = low_stages()
    pipe = pipeline(schedule, stages, mesh, square_loss)
    reduced = []
    for reduce in reduces:
        loss = pipe.step(*low_batch(replica_of(mesh)), reduce=reduce)
        assert pipe.report is not None
        reduced.append(pipe.report.reduced)
    return float(loss), own_grads(schedule, mesh, stages), reduced


def as_double(grads: Grads) -> Grads:
    return {name: None if g is None else g.double() for name, g in grads.items()}


@cache
def low_reference(dp: int, num_steps: int) -> tuple[Grads, float]:
    """The exact gradients, and how far from them one is who sums those of micro-batches, each in bfloat16, exactly.

    One who sums in bfloat16, as autograd does by itself, is much farther.
    """
    batches = [low_batch(replica) for replica in range(dp)]
    exact, once, naive = [stage.double() for stage in low_stages()], low_stages(), low_stages()
    doubles = [(x.double(), y.double()) for x, y in batches]
    for _ in range(num_steps):
        run_whole(exact, cut(doubles, NUM_LOW), square_loss)
    wanted = grads_of(dict(enumerate(exact)))
    summed = {name: torch.zeros_like(g) for name, g in wanted.items() if g is not None}
    for microbatch in cut(batches, NUM_LOW) * num_steps:
        for stages in (once, naive):
            run_whole(stages, [microbatch], square_loss, num_tokens=NUM_LOW * dp)
        for name, g in as_double(grads_of(dict(enumerate(once)))).items():
            assert g is not None
            summed[name] += g
        for stage in once:
            stage.zero_grad()
    bound = worst(summed, wanted)[0] + 2**-7
    assert worst(as_double(grads_of(dict(enumerate(naive)))), wanted)[0] > 3 * bound
    return wanted, bound


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(("dp", "reduces"), [(1, (True,)), (2, (True,)), (2, (False, True))])
def test_gradients_of_bfloat16_are_summed_in_float32(name: str, dp: int, reduces: tuple[bool, ...]) -> None:
    wanted, bound = low_reference(dp, len(reduces))
    for _, grads, reduced in check(run_ranks(2 * dp, step_low, name, dp, reduces)):
        assert all(g is not None and g.dtype is torch.bfloat16 for g in grads.values())
        difference, where = worst(as_double(grads), wanted)
        assert difference <= bound, f"{where} differs by {difference}"
        assert reduced == [dp == 1 or reduce for reduce in reduces]


class Island(nn.Module):
    """Most of it in autocast's precision, and a product that is kept in float32, as routers are."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(size, size), nn.LayerNorm(size)
        self.w = nn.Parameter(torch.randn(size, size) / size**0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.linear(self.norm(x)))
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.w


def autocast_stages(island: bool) -> list[nn.Module]:
    torch.manual_seed(9)
    middle: list[nn.Module] = [Island(8), Island(8)] if island else []
    return [nn.Sequential(Embed(8), *middle), nn.Sequential(*copy.deepcopy(middle), Head(8))]


def step_autocast(rank: int, island: bool) -> list[tuple[float, Grads]]:
    del rank
    mesh, ran = make_mesh(2), []
    for name in ("1f1b", "zb-h1"):
        schedule, stages = schedule_of(name, 2, 6), autocast_stages(island)
        pipe = pipeline(schedule, stages, mesh, float_loss)
        with torch.autocast("cpu", torch.bfloat16):
            loss = pipe.step(*make_batch(6))
        ran.append((float(loss), own_grads(schedule, mesh, stages)))
        pipe.close()
    return ran


def float_loss(output: Tensor, target: Tensor) -> Tensor:
    return mean_loss(output.float(), target)


@pytest.mark.parametrize("island", [False, True])
def test_autocast_around_a_step(island: bool) -> None:
    """As torch has it, forward in autocast and backward outside: each backward then runs in its forward's precision."""
    stages = autocast_stages(island)
    plain = autocast_stages(island)
    run_whole(plain, cut([make_batch(6)], 6), float_loss)
    losses = []
    for x, y in cut([make_batch(6)], 6):
        with torch.autocast("cpu", torch.bfloat16):
            out = stages[1](stages[0](x))
            loss = float_loss(out, y)
        (loss / 6).backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
    wanted = sum(losses) / 6, grads_of(dict(enumerate(stages)))
    assert worst(wanted[1], grads_of(dict(enumerate(plain))))[0] > 1e-4, "autocast did nothing"
    ranks = check(run_ranks(2, step_autocast, island))
    for place, name in enumerate(("1f1b", "zb-h1")):
        hold([ran[place] for ran in ranks], wanted, most=1e-5, note=name)


def double_stages() -> list[nn.Module]:
    torch.manual_seed(15)
    return [nn.Linear(6, 6).double() for _ in range(2)]


def step_double(rank: int) -> tuple[float, Grads]:
    del rank
    schedule, mesh, stages = schedule_of("zb-h1", 2, 4), make_mesh(2), double_stages()
    pipe = pipeline(schedule, stages, mesh, square_loss)
    with torch.autocast("cpu", torch.bfloat16):
        loss = pipe.step(*float_batch(4))
    return float(loss), own_grads(schedule, mesh, stages)


def test_autocast_leaves_float64_alone() -> None:
    """As torch's does: what is meant to be exact stays so."""
    stages = double_stages()
    losses = run_whole(stages, cut([float_batch(4)], 4), square_loss)
    hold(check(run_ranks(2, step_double)), (sum(losses) / 4, grads_of(dict(enumerate(stages)))))


# -- randomness --------------------------------------------------------------------------------------------------------

NUM_LAYERS = 12
SEED = 11


class Dropped(nn.Module):
    """A layer with dropout at two places, checkpointed if it is told to."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.checkpointed = checkpointed

    def inner(self, x: Tensor) -> Tensor:
        x = functional.dropout(torch.tanh(self.linear(x)), 0.3)
        return x + functional.dropout(self.other(x), 0.3)

    def forward(self, x: Tensor) -> Tensor:
        if not self.checkpointed:
            return self.inner(x)
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


def dropout_layers(checkpointed: bool) -> list[nn.Module]:
    torch.manual_seed(10)
    return [nn.Dropout(0.2) if i % 4 == 2 else Dropped(checkpointed).double() for i in range(NUM_LAYERS)]


def dropout_stages(num_stages: int, *, checkpointed: bool) -> list[nn.Module]:
    layers, each = dropout_layers(checkpointed), NUM_LAYERS // num_stages
    return [nn.Sequential(*layers[i * each : (i + 1) * each]) for i in range(num_stages)]


def float_batch(num_mb: int, replica: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + replica)
    x, y = torch.randn(2, num_mb * 2, 6, generator=generator, dtype=torch.float64)
    return x, y


def by_layer(grads: Grads, num_stages: int) -> Grads:
    """Gradients named by layer of the model, whatever the stages."""
    each = NUM_LAYERS // num_stages
    renamed = {}
    for name, grad in grads.items():
        stage, layer, rest = name.split(".", 2)
        renamed[f"{int(stage) * each + int(layer)}.{rest}"] = grad
    return renamed


def step_dropout(
    rank: int, pp: int, dp: int, listed: Sequence[tuple[str, int]], checkpointed: bool
) -> list[list[tuple[float, Grads]]]:
    """Two steps of each schedule."""
    del rank
    mesh, ran = make_mesh(pp, dp), []
    for name, vpp in listed:
        schedule = schedule_of(name, pp, 8, vpp)
        num_stages = schedule.placement.num_stages
        stages = dropout_stages(num_stages, checkpointed=checkpointed)
        pipe = pipeline(schedule, stages, mesh, square_loss, seed=SEED)
        steps = []
        for _ in range(2):
            torch.manual_seed(1)
            wanted = torch.rand(3), torch.rand(3)
            torch.manual_seed(1)
            before = torch.rand(3)
            loss = pipe.step(*float_batch(8, replica_of(mesh)))
            assert torch.equal(before, wanted[0])
            assert torch.equal(torch.rand(3), wanted[1]), "the caller's own random numbers went on from elsewhere"
            steps.append((float(loss), by_layer(own_grads(schedule, mesh, stages), num_stages)))
            for stage in stages:
                stage.zero_grad()
        ran.append(steps)
        pipe.close()
    return ran


def whole_dropout(dp: int, step: int, layers: Sequence[nn.Module]) -> tuple[float, Grads]:
    losses = []
    for mb, (x, y) in enumerate(cut([float_batch(8, replica) for replica in range(dp)], 8)):
        for number, layer in enumerate(layers):
            seed_layer(torch.get_default_device(), SEED, step, mb, number, len(layers))
            x = layer(x)
        loss = square_loss(x, y)
        (loss / (8 * dp)).backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
    return sum(losses) / len(losses), grads_of(dict(enumerate(layers)))


def dropout_sizes(pp: int) -> list[tuple[str, int]]:
    found = []
    for name, family in SCHEDULES.items():
        for vpp in family.vpps or (1, 2, 3):
            schedule = nearest(name, pp, 8, vpp)
            if schedule is not None and NUM_LAYERS % schedule.placement.num_stages == 0:
                found.append((name, vpp))
    return found


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (4, 1), (2, 2)])
def test_dropout_does_not_depend_on_the_schedule(pp: int, dp: int) -> None:
    listed = dropout_sizes(pp)
    if pp == 2:
        assert {name for name, _ in listed} == set(SCHEDULES)
    wanted = [whole_dropout(dp, step, dropout_layers(False)) for step in range(2)]
    assert wanted[0][0] != pytest.approx(wanted[1][0], rel=1e-3)
    ranks = check(run_ranks(pp * dp, step_dropout, pp, dp, listed, False))
    for place, case in enumerate(listed):
        for step in range(2):
            hold([ran[place][step] for ran in ranks], wanted[step], note=(case, step))


@pytest.mark.parametrize("dp", [1, 2])
def test_activation_checkpointing_with_dropout(dp: int) -> None:
    listed = [("1f1b", 1), ("zb-h1", 1), ("zb-v", 2), ("dualpipe", 2)]
    wanted = [whole_dropout(dp, step, dropout_layers(False)) for step in range(2)]
    ranks = check(run_ranks(2 * dp, step_dropout, 2, dp, listed, True))
    for place, case in enumerate(listed):
        for step in range(2):
            hold([ran[place][step] for ran in ranks], wanted[step], note=(case, step))


def layers_with_one_dropout() -> list[nn.Module]:
    """One dropout, used between any two layers, as it is often written."""
    torch.manual_seed(12)
    drop = nn.Dropout(0.4)
    return [nn.Linear(6, 6).double(), drop, nn.Linear(6, 6).double(), drop]


def step_one_dropout(rank: int) -> tuple[float, Grads]:
    del rank
    schedule, mesh = schedule_of("1f1b", 2, 8), make_mesh(2)
    stages = [nn.Sequential(*layers_with_one_dropout()), nn.Sequential(*layers_with_one_dropout())]
    pipe = pipeline(schedule, stages, mesh, square_loss, seed=SEED)
    return float(pipe.step(*float_batch(8))), own_grads(schedule, mesh, stages)


def test_one_dropout_module_at_several_places_of_a_stage() -> None:
    layers = [*layers_with_one_dropout(), *layers_with_one_dropout()]
    loss, grads = whole_dropout(1, 0, layers)
    renamed = {f"{int(n[0]) // 4}.{int(n[0]) % 4}{n[1:]}": g for n, g in grads.items()}
    hold(check(run_ranks(2, step_one_dropout)), (loss, renamed))


def chunks_with_one_dropout() -> list[nn.Module]:
    """The same dropout in the first and the last stage, which are on one rank in a V."""
    torch.manual_seed(14)
    drop, linears = nn.Dropout(0.4), [nn.Linear(6, 6).double() for _ in range(4)]
    return [nn.Sequential(linears[0], drop), *map(nn.Sequential, linears[1:3]), nn.Sequential(linears[3], drop)]


def step_chunks_with_one_dropout(rank: int) -> tuple[float, Grads]:
    del rank
    schedule, mesh, stages = schedule_of("zb-v", 2, 8), make_mesh(2), chunks_with_one_dropout()
    pipe = pipeline(schedule, stages, mesh, square_loss, seed=SEED)
    return float(pipe.step(*float_batch(8))), own_grads(schedule, mesh, stages)


def test_one_dropout_module_in_two_chunks_of_a_rank() -> None:
    stages = chunks_with_one_dropout()
    loss, _ = whole_dropout(1, 0, [layer for stage in stages for layer in cast(nn.Sequential, stage)])
    hold(check(run_ranks(2, step_chunks_with_one_dropout)), (loss, grads_of(dict(enumerate(stages)))))


# -- losses that are not finite ----------------------------------------------------------------------------------------


def weighted_loss(output: Tensor, target: tuple[Tensor, float]) -> Tensor:
    return mean_loss(output, target[0]) * target[1]


def step_nan(rank: int, name: str, dp: int) -> list[tuple[float, list[float], bool, bool]]:
    """A step with a NaN in the micro-batch 2 of replica 0, then one without."""
    del rank
    schedule, mesh = schedule_of(name, 2, 4), make_mesh(2, dp)
    stages = make_stages(schedule.placement.num_stages)
    pipe = pipeline(schedule, stages, mesh, weighted_loss)
    seen = []
    for bad in (True, False):
        inputs, targets = make_batch(4, replica_of(mesh))
        weights = [float("nan") if bad and mb == 2 and replica_of(mesh) == 0 else 1.0 for mb in range(4)]
        loss = pipe.step(inputs, list(zip(targets.chunk(4), weights, strict=True)))
        assert pipe.report is not None
        grads = [p.grad for stage in pipe.stages.values() for p in stage.module.parameters()]
        finite = all(g is not None and bool(g.isfinite().all()) for g in grads)
        seen.append((float(loss), pipe.report.losses.tolist(), pipe.report.finite, finite))
        for stage in stages:
            stage.zero_grad()
    return seen


@pytest.mark.parametrize(("name", "dp"), [("1f1b", 1), ("zb-v", 2), ("dualpipe", 1)])
def test_a_nan_is_told_on_all_ranks(name: str, dp: int) -> None:
    ranks = check(run_ranks(2 * dp, step_nan, name, dp))
    for rank, (bad, good) in enumerate(ranks):
        loss, losses, finite, grads_finite = bad
        assert loss != loss
        assert not finite
        assert not grads_finite
        assert [mb for mb, x in enumerate(losses) if x != x] == ([2] if rank % dp == 0 else [])
        assert good[2]
        assert good[3]
        assert good[0] == good[0]


def overflow(rank: int) -> tuple[float, bool]:
    """A gradient that is infinite on the first rank only, under a loss that is finite."""
    schedule, mesh = schedule_of("1f1b", 2, 2), make_mesh(2)
    stages = make_stages(2)
    if rank == 0:
        parameter = next(stages[0].parameters())
        parameter.register_hook(lambda grad: grad * float("inf"))  # type: ignore[no-untyped-call]
    pipe = pipeline(schedule, stages, mesh)
    loss = pipe.step(*make_batch(2))
    assert pipe.report is not None
    return float(loss), pipe.report.finite


def test_a_gradient_that_is_not_finite_is_told_on_all_ranks() -> None:
    for loss, finite in check(run_ranks(2, overflow)):
        assert loss == loss
        assert not finite


# -- batches that do not fit -------------------------------------------------------------------------------------------


def bad_batches(rank: int) -> list[str]:
    schedule, mesh = schedule_of("1f1b", 2, 4), make_mesh(2)
    inputs, targets = make_batch(4)

    def step(x: Any, y: Any, **given: Any) -> Tensor:
        """With a pipeline of its own: a refusal is told to the other ranks, for which this one is lost."""
        return pipeline(schedule, make_stages(2), mesh).step(x, y, **given)

    said = [
        refusal(lambda: step(inputs[:7], targets[:7])),
        refusal(lambda: step(list(inputs.chunk(8)), list(targets.chunk(8)))),
        refusal(lambda: step(inputs[:0], targets[:0])),
        refusal(lambda: step(inputs, targets, num_tokens=0)),
    ]
    loss = step(inputs if rank == 0 else None, targets if rank == 1 else None)
    assert float(loss) > 0
    return said


def test_a_batch_that_does_not_fit_is_refused() -> None:
    ranks = check(run_ranks(2, bad_batches, timeout_s=30))
    for what, (divides, number, empty, tokens) in zip(("inputs", "targets"), ranks, strict=True):
        assert divides == (
            f"{what} of 4 micro-batches are a batch that 4 divides, got 7; give a multiple of 4, or a list of 4"
        )
        assert "the schedule has 4 micro-batches, got 8" in number
        assert what in number
        assert "got 0" in empty
        assert "num_tokens" in tokens


def bad_batch_on_one(rank: int) -> str:
    """Rank 0's inputs do not fit; rank 1 has nothing wrong."""
    schedule, mesh = schedule_of("1f1b", 2, 4), make_mesh(2)
    pipe = pipeline(schedule, make_stages(2), mesh, deadline_s=20)
    inputs, targets = make_batch(4)
    pipe.step(inputs[:7] if rank == 0 else None, targets)
    return "not refused"


def ended_soon(outcomes: Sequence[Outcome[Any]], refusing: int, match: str) -> None:
    """The rank at fault says why, and no other hangs."""
    assert not any(outcome.timed_out for outcome in outcomes), "\n".join(map(str, outcomes))
    assert not any(outcome.returned for outcome in outcomes)
    error = outcomes[refusing].error
    assert error is not None
    assert error.type == "ValueError"
    assert match in error.message
    assert all(outcome.ended_s - outcomes[refusing].ended_s < 10 for outcome in outcomes)


def test_a_batch_that_does_not_fit_on_one_rank_does_not_keep_the_others() -> None:
    ended_soon(run_ranks(2, bad_batch_on_one, timeout_s=40), 0, "inputs of 4 micro-batches")


def changing_shape(rank: int, name: str) -> None:
    """Micro-batch 2 has another shape."""
    del rank
    schedule, mesh = schedule_of(name, 2, 4), make_mesh(2)
    pipe = pipeline(schedule, make_stages(schedule.placement.num_stages), mesh, deadline_s=20)
    inputs, targets = (list(x.chunk(4)) for x in make_batch(4))
    inputs[2], targets[2] = inputs[2][:1], targets[2][:1]
    pipe.step(inputs, targets)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_an_output_that_changes_its_shape_is_refused(name: str) -> None:
    outcomes = run_ranks(2, changing_shape, name, timeout_s=40)
    ended_soon(outcomes, 0, "stage 0 returned (1, 3, 8) float64 for micro-batch 2, but (2, 3, 8) float64 before")
    error = outcomes[0].error
    assert error is not None
    assert "pad them, or make a new Pipeline" in error.message


class Returns(nn.Module):
    """A stage that returns something that is no tensor."""

    def __init__(self, stage: nn.Module, kind: str) -> None:
        super().__init__()
        self.stage, self.kind = stage, kind

    def forward(self, x: Tensor) -> Any:
        out = self.stage(x)
        if self.kind == "number":
            return treadle.StageOutput(out, 1.0)  # type: ignore[arg-type]
        if self.kind == "vector":
            return treadle.StageOutput(out, out.sum(-1).flatten())
        return {"logits": out}


def strange_returns(rank: int, kind: str) -> None:
    del rank
    schedule, mesh = schedule_of("1f1b", 2, 2), make_mesh(2)
    first, last = make_stages(2)
    pipe = pipeline(schedule, [Returns(first, kind), last], mesh, deadline_s=20)
    pipe.step(*make_batch(2))


@pytest.mark.parametrize(
    ("kind", "match"), [("dict", "stage 0 returned dict"), ("number", "got float"), ("vector", "got a tensor of shape")]
)
def test_what_a_stage_may_not_return(kind: str, match: str) -> None:
    ended_soon(run_ranks(2, strange_returns, kind, timeout_s=40), 0, match)


def loss_per_token(rank: int) -> None:
    del rank
    schedule, mesh = schedule_of("1f1b", 2, 2), make_mesh(2)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")

    pipeline(schedule, make_stages(2), mesh, loss_fn, deadline_s=20).step(*make_batch(2))


def test_a_loss_that_is_no_number_is_refused() -> None:
    ended_soon(run_ranks(2, loss_per_token, timeout_s=40), 1, "a loss is one number for a micro-batch, got a tensor")


# -- parts that do not fit together ------------------------------------------------------------------------------------


def missing_chunk(rank: int) -> Callable[[], object]:
    schedule, mesh = schedule_of("interleaved", 2, 4, 2), make_mesh(2)
    own = chunks_of(schedule, rank, make_stages(4))
    if rank == 1:
        del own[1]
    return lambda: treadle.Pipeline(own, schedule, mesh=mesh, loss_fn=mean_loss)


def test_a_chunk_that_is_missing_is_refused() -> None:
    first, second = refusals(2, missing_chunk)
    assert "a module for each chunk of this rank, [0, 1], got [0]" in second
    assert "stages (1, 3)" in second
    assert "rank 1 could not make its part of the pipeline" in first


def one_bad_part(rank: int) -> Callable[[], object]:
    """Four ranks in two replicas; only the last has a chunk too many."""
    schedule, mesh = schedule_of("1f1b", 2, 4), make_mesh(2, 2)
    own = chunks_of(schedule, mesh.get_local_rank("pp"), make_stages(2))
    if rank == 3:
        own[5] = nn.Identity()
    return lambda: treadle.Pipeline(own, schedule, mesh=mesh, loss_fn=mean_loss)


def test_all_replicas_refuse_if_one_rank_has_a_bad_part() -> None:
    *others, last = refusals(4, one_bad_part)
    assert "got [0, 5]" in last
    assert all("could not make its part of the pipeline" in said for said in others), others


def wrapped_stage(rank: int) -> Callable[[], object]:
    schedule, mesh = schedule_of("1f1b", 2, 4), make_mesh(2)
    groups = [dist.new_group([r]) for r in range(2)]
    stage = make_stages(2)[rank]
    wrapped = nn.parallel.DistributedDataParallel(stage, process_group=groups[rank])
    return lambda: treadle.Pipeline({0: wrapped}, schedule, mesh=mesh, loss_fn=mean_loss)


def test_a_stage_wrapped_for_data_parallelism_is_refused() -> None:
    for said in refusals(2, wrapped_stage):
        assert "chunk 0 is a DistributedDataParallel; give the module inside" in said


OTHERS = {
    "another order": lambda: schedule_of("gpipe", 2, 4),
    "more micro-batches": lambda: schedule_of("1f1b", 2, 6),
    "more chunks": lambda: schedule_of("interleaved", 2, 4, 2),
    "more ranks": lambda: schedule_of("1f1b", 4, 4),
    "another placement": lambda: treadle.loads("# placement: 1/0\n0: F0.0 B0.0 F1.0 B1.0\n1: F0.0 F1.0 B0.0 B1.0\n"),
    "other receives": lambda: replace(
        schedule_of("1f1b", 2, 4), receives={(0, 1): tuple(treadle.F(mb, 0) for mb in (1, 0, 2, 3))}
    ),
}


def other_schedule(dp: int, odd: int, what: str) -> Callable[[int], Callable[[], object]]:
    def make(rank: int) -> Callable[[], object]:
        schedule, mesh = OTHERS[what]() if rank == odd else schedule_of("1f1b", 2, 4), make_mesh(2, dp)
        stages = make_stages(schedule.placement.num_stages)
        return lambda: pipeline(schedule, stages, mesh)

    return make


class OtherSchedule:
    """`other_schedule` as something that can be sent to a rank."""

    def __init__(self, dp: int, odd: int, what: str) -> None:
        self.args = dp, odd, what

    def __call__(self, rank: int) -> Callable[[], object]:
        return other_schedule(*self.args)(rank)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("what", OTHERS)
def test_different_schedules_are_refused(what: str, dp: int) -> None:
    for rank, said in enumerate(refusals(2 * dp, OtherSchedule(dp, 2 * dp - 1, what))):
        assert said != "not refused", rank
        assert "schedule" in said or "could not make its part" in said


def deadlock(rank: int) -> Callable[[], object]:
    del rank
    schedule = treadle.loads("0: F0.0 B0.0 F1.0 B1.0\n1: F0.0 F1.0 B0.0 B1.0\n")
    stages, mesh = make_stages(2), make_mesh(2)
    return lambda: pipeline(schedule, stages, mesh)


def test_a_schedule_that_would_hang_is_refused() -> None:
    for said in refusals(2, deadlock):
        assert "the schedule is not sound: T201" in said
        assert "'treadle verify' shows it all" in said


def wrong_mesh(rank: int) -> list[str]:
    """Refusals of meshes that do not fit; a mesh may have dp before pp."""
    del rank
    stages = make_stages(2)
    meshes = [
        init_device_mesh(DEVICE_TYPE, (2,), mesh_dim_names=("tp",)),
        init_device_mesh(DEVICE_TYPE, (2, 1), mesh_dim_names=("pp", "tp")),
        init_device_mesh(DEVICE_TYPE, (2,)),
        make_mesh(2),
    ]
    sizes = [2, 2, 2, 4]
    return [
        refusal(
            lambda pp=pp, mesh=mesh: treadle.Pipeline(  # type: ignore[misc]
                {0: stages[0]}, schedule_of("1f1b", pp, 4), mesh=mesh, loss_fn=mean_loss
            )
        )
        for pp, mesh in zip(sizes, meshes, strict=True)
    ]


def test_a_mesh_that_does_not_fit_is_refused() -> None:
    for *names, size in check(run_ranks(2, wrong_mesh)):
        for said, got in zip(names, ("('tp',)", "('pp', 'tp')", "None"), strict=True):
            assert f"got {got}" in said
            assert 'mesh_dim_names=("pp", "dp")' in said
        assert "the schedule is for 4 ranks, the mesh has 2 along pp" in size


def dp_before_pp(rank: int) -> tuple[float, Grads]:
    del rank
    schedule = schedule_of("zb-h1", 2, 4)
    mesh = init_device_mesh(DEVICE_TYPE, (2, 2), mesh_dim_names=("dp", "pp"))
    stages = make_stages(2)
    pipe = pipeline(schedule, stages, mesh)
    return float(pipe.step(*make_batch(4, replica_of(mesh)))), own_grads(schedule, mesh, stages)


def plain_stages() -> list[nn.Module]:
    return make_stages(2)


def test_a_mesh_with_dp_before_pp() -> None:
    hold(check(run_ranks(4, dp_before_pp)), whole_once(plain_stages, 4, 2))


class Copies:
    """Copies of stages that differ on the last rank in the way that `what` says."""

    def __init__(self, name: str, dp: int, what: str) -> None:
        self.args = name, dp, what

    def __call__(self, rank: int) -> Callable[[], object]:
        name, dp, what = self.args
        schedule, mesh = schedule_of(name, 2, 4), make_mesh(2, dp)
        stages = make_stages(2)
        if rank == 2 * dp - 1:
            parameter = next(p for p in stages[-1].parameters() if p.dim() == 2)
            with torch.no_grad():
                if what == "order":
                    parameter.copy_(parameter.flip(0))
                else:
                    parameter[0, 0] += 1e-6
        if what == "frozen":
            stages[-1].requires_grad_(False)
        return lambda: pipeline(schedule, stages, mesh)


@pytest.mark.parametrize("what", ["value", "order", "frozen"])
@pytest.mark.parametrize(("name", "dp"), [("1f1b", 2), ("dualpipe", 1), ("dualpipe", 2)])
def test_copies_that_start_apart_are_refused(name: str, dp: int, what: str) -> None:
    """Also where sums are the same, and where nothing trains: the results would be wrong all the same."""
    said = refusals(2 * dp, Copies(name, dp, what))
    assert "copies of a stage start from different parameters" in said[-1]
    assert "make them from one seed, or broadcast them" in said[-1]
    assert "not refused" not in said


# -- stages whose backward is not split --------------------------------------------------------------------------------


def bare_stages() -> list[nn.Module]:
    torch.manual_seed(13)
    return [stage.double() for stage in (Embed(8), Bare(8, 6), Block(6, 7), Head(7))]


def frozen_stages() -> list[nn.Module]:
    stages = make_stages(4)
    stages[0].requires_grad_(False)
    return stages


def kinds_of(pipe: treadle.Pipeline, pp_rank: int, chunk: int = 0) -> set[str]:
    """The kinds of compute ops of a chunk."""
    program = pipe.program
    rank = program.lane_rank[program.lane_of]
    compute = program.lane_kind[program.lane_of] == LaneKind.COMPUTE
    return {OpKind(int(k)).name for k in program.kind[compute & (rank == pp_rank) & (program.chunk == chunk)]}


def step_unsplit(rank: int, name: str, what: str) -> tuple[float, Grads, dict[int, str], list[list[set[str]]]]:
    """Stage 1 cannot be split, or stage 0 does not train."""
    del rank
    pp = 4 if name == "zb-h1" else 2
    schedule, mesh = schedule_of(name, pp, 8), make_mesh(pp)
    stages = frozen_stages() if what == "frozen" else bare_stages() if what == "bare" else make_stages(4)
    run = list(stages)
    if what == "compiled":
        run[1] = cast(nn.Module, torch.compile(stages[1], backend="eager"))
    elif what == "compiled in place":
        stages[1].compile(backend="eager")
    pipe = pipeline(schedule, run, mesh)
    loss = pipe.step(*make_batch(8))
    splits = {
        schedule.placement.stage(mesh.get_local_rank("pp"), chunk): str(split) for chunk, split in pipe.splits.items()
    }
    kinds = [[kinds_of(pipe, r, c) for c in range(schedule.vpp)] for r in range(pp)]
    return float(loss), own_grads(schedule, mesh, stages), splits, kinds


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
@pytest.mark.parametrize(
    ("what", "stage", "why"),
    [
        ("compiled", 1, "it is compiled"),
        ("compiled in place", 1, "it is compiled"),
        ("bare", 1, "it has no nn.Linear that trains"),
        ("frozen", 0, "it has no nn.Linear that trains"),
    ],
)
def test_a_stage_whose_backward_cannot_be_split_runs_it_whole(name: str, what: str, stage: int, why: str) -> None:
    schedule = schedule_of(name, 4 if name == "zb-h1" else 2, 8)
    stages = frozen_stages() if what == "frozen" else bare_stages() if what == "bare" else make_stages(4)
    losses = run_whole(stages, cut([make_batch(8)], 8), mean_loss)
    wanted = sum(losses) / 8, grads_of(dict(enumerate(stages)))
    ranks = check(run_ranks(schedule.pp, step_unsplit, name, what, timeout_s=100))
    hold([(loss, grads) for loss, grads, _, _ in ranks], wanted)
    said = {number: text for _, _, splits, _ in ranks for number, text in splits.items()}
    assert said[stage] == f"backward runs whole: {why}"
    assert all("get their gradient in the weight half" in said[s] for s in range(4) if s != stage)
    holder = schedule.placement.holder(stage)
    for _, _, _, kinds in ranks:
        for r, chunks in enumerate(kinds):
            for c, found in enumerate(chunks):
                assert found == ({"F", "B"} if (r, c) == holder else {"F", "I", "W"}), (r, c)


def uneven_replicas(rank: int) -> tuple[str, float, Grads]:
    """In replica 1 the first and the last stage are compiled, in replica 0 they are not."""
    del rank
    schedule, mesh, stages = schedule_of("zb-v", 2, 4), make_mesh(2, 2), make_stages(4)
    if replica_of(mesh) == 1:
        for stage in (stages[0], stages[3]):
            stage.compile(backend="eager")
    try:
        pipe = pipeline(schedule, stages, mesh)
    except ValueError as error:
        dist.barrier()
        return str(error), 0.0, {}
    loss = pipe.step(*make_batch(4, replica_of(mesh)))
    assert pipe.trace.program.num_ranks == 4
    return "", float(loss), own_grads(schedule, mesh, stages)


def test_replicas_of_which_only_some_can_split_are_right_or_refused() -> None:
    ranks = check(run_ranks(4, uneven_replicas, timeout_s=100))
    if any(said for said, _, _ in ranks):
        assert all("replica" in said or "dp" in said for said, _, _ in ranks)
        return
    stages = make_stages(4)
    losses = run_whole(stages, cut([make_batch(4, replica) for replica in range(2)], 4), mean_loss)
    hold([(loss, grads) for _, loss, grads in ranks], (sum(losses) / 8, grads_of(dict(enumerate(stages)))))
