"""Parameters that stages share, do not use, or have in an unusual form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.support.cases import (
    Grads,
    hold,
    replica_of,
    step_once,
    whole_once,
)
from tests.support.oracle import (
    Block,
    Embed,
    Head,
    cut,
    grads_of,
    make_batch,
    make_mesh,
    make_stages,
    mean_loss,
    run_whole,
)
from tests.support.ranks import check, run_ranks


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


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_parameters_tied_within_a_stage_of_two_replicas(name: str) -> None:
    ranks = check(run_ranks(4, step_once, name, 4, 2, tied_within, mean_loss))
    hold(ranks, whole_once(tied_within, 4, 2))


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
@pytest.mark.parametrize(
    ("what", "dp"), [("empty", 2), ("weight norm", 2), ("pruned", 2), ("hooked", 2), ("hooked after", 1)]
)
def test_unusual_parameters(what: str, dp: int) -> None:
    """What a hook behind each accumulation sees of several replicas is not said anywhere."""
    wanted = whole_once(UNUSUAL[what], 4, dp)
    ranks = check(run_ranks(2 * dp, step_unusual, what, dp))
    for place, name in enumerate(("1f1b", "zb-h1")):
        hold([ran[place] for ran in ranks], wanted, note=name)


def test_sparse_gradients_of_two_replicas_are_right_or_refused() -> None:
    outcomes = run_ranks(4, step_unusual, "sparse", 2)
    if all(outcome.ok for outcome in outcomes):
        loss, grads = whole_once(sparse_embedding, 4, 2)
        wanted = loss, {name: g.to_dense() if g is not None else None for name, g in grads.items()}
        for ran in check(outcomes):
            for loss, grads in ran:
                hold([(loss, {name: g.to_dense() if g is not None else None for name, g in grads.items()})], wanted)
        return
    errors = [outcome.error for outcome in outcomes]
    assert any(e is not None and e.type == "ValueError" and "sparse" in e.message for e in errors), errors
