"""Parameters that a step gathers, and gradients that it reduces, by bucket: on real ranks, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treadle
from tests.support.grid import pairs
from tests.support.ranks import check, run_ranks
from tests.train.layouts import Layout, Placed, batch, place, values
from tests.train.optim.test_sharded import CONFIG, LR, MAX_NORM, hold_copies_equal, train, train_whole
from treadle.ir.ops import OpKind
from treadle.runtime.model.gradient_bucket import GradientBucket
from treadle.schedules import SCHEDULES
from treadle.train.optim import ShardedOptimizer

MESHES = ((2, 1, 2), (2, 2, 1))
"""(pp, ep, dp)."""

WAYS: tuple[dict[str, Any], ...] = ({}, {"recompute": ("attn",)}, {"saved": "offload"})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "way"), pairs(SCHEDULES, range(len(MESHES)), range(len(WAYS))))
def test_steps_that_gather_are_those_of_adamw_in_one_process(name: str, mesh: int, way: int) -> None:
    """Every schedule, with experts, a tied table, recompute and offload; buckets of a few hundred parameters."""
    pp, ep, dp = MESHES[mesh]
    ranks = check(run_ranks(4, train, Layout(name, pp=pp, ep=ep, dp=dp, **WAYS[way])))
    wanted, norms = train_whole(ep * dp)
    for result in ranks:
        assert result["norms"] == pytest.approx(norms, rel=1e-10)
        for tensor, value in result["values"].items():
            assert float((value - wanted[tensor]).abs().max()) <= 1e-10, tensor
    hold_copies_equal(ranks)


def updated(rank: int, layout: Layout) -> tuple[Placed, ShardedOptimizer]:
    """A pipeline behind one step and its update."""
    placed = place(rank, layout)
    optimizer = ShardedOptimizer(placed.pipe, placed.views, CONFIG)
    train_once(placed, optimizer, 0)
    return placed, optimizer


def train_once(placed: Placed, optimizer: ShardedOptimizer, step: int) -> None:
    placed.step(step)
    optimizer.clip(MAX_NORM)
    optimizer.step(LR)
    optimizer.zero_grad()


def at_once(rank: int) -> dict[str, dict[str, Tensor]]:
    """What parameters are after an update, and after each call that makes them whole."""
    found = {}
    for call in ("nothing", "gather_parameters", "evaluate", "state_dict", "close"):
        placed, optimizer = updated(rank, Layout(pp=2, dp=2))
        tokens, targets = (list(x[placed.replica]) for x in batch(0, 2))
        if call == "gather_parameters":
            placed.pipe.gather_parameters()
        elif call == "evaluate":
            placed.pipe.evaluate(tokens, targets)
        elif call == "state_dict":
            optimizer.state_dict()
        elif call == "close":
            placed.pipe.close()
        found[call] = values(placed.views)
        placed.pipe.close()
    return found


@pytest.mark.slow
def test_parameters_are_whole_after_each_call_that_reads_them() -> None:
    ranks = check(run_ranks(4, at_once))
    for found in ranks:
        whole = found["gather_parameters"]
        for call in ("evaluate", "state_dict", "close"):
            assert all(torch.equal(value, whole[name]) for name, value in found[call].items()), call
    assert any(
        not torch.equal(value, found["gather_parameters"][name])
        for found in ranks
        for name, value in found["nothing"].items()
    ), "without a call the others' parts come with the next step"
    hold_copies_equal([{"values": found["close"]} for found in ranks])


def programs(rank: int) -> tuple[list[str], list[str], list[str], float, float]:
    """The kinds of collectives of a first step, of one after an update, and of one in `no_sync` after an update."""
    placed = place(rank, Layout(pp=2, dp=2))
    optimizer = ShardedOptimizer(placed.pipe, placed.views, CONFIG)
    kinds = []
    for step in range(2):
        train_once(placed, optimizer, step)
        kinds.append(collectives(placed.pipe.gather_trace()))
    with placed.pipe.no_sync():
        placed.step(2)
    kinds.append(collectives(placed.pipe.gather_trace()))
    placed.step(3)
    again = collectives(placed.pipe.gather_trace())
    assert "GATHER_PARAMS" not in again, "nothing was updated since"
    tokens, targets = (list(x[placed.replica]) for x in batch(0, 2))
    before = float(placed.pipe.evaluate(tokens, targets))
    placed.pipe.gather_parameters()
    after = float(placed.pipe.evaluate(tokens, targets))
    placed.pipe.close()
    return kinds[0], kinds[1], kinds[2], before, after


def collectives(trace: treadle.Trace) -> list[str]:
    kinds = {OpKind(int(kind)).name for kind in trace.program.kind}
    return sorted(kinds & {"REDUCE_GRAD", "REDUCE_SCATTER", "GATHER_PARAMS"})


@pytest.mark.slow
def test_a_step_gathers_what_an_update_left_in_parts_and_nothing_else() -> None:
    for first, second, local, before, after in check(run_ranks(4, programs)):
        assert first == ["REDUCE_SCATTER"]
        assert second == ["GATHER_PARAMS", "REDUCE_SCATTER"]
        assert local == ["GATHER_PARAMS"]
        assert before == after


def fail_between(rank: int) -> dict[str, Tensor]:
    """A step after an update is refused by all ranks at its end, behind its gathers; the next one goes on."""
    placed = place(rank, Layout(pp=1, dp=2))
    optimizer = ShardedOptimizer(placed.pipe, placed.views, CONFIG)
    train_once(placed, optimizer, 0)
    tokens, targets = (list(x[placed.replica]) for x in batch(1, 2))
    with pytest.raises(ValueError, match="different num_tokens"):
        placed.pipe.step(tokens, targets, num_tokens=1.0 + rank)
    train_once(placed, optimizer, 1)
    train_once(placed, optimizer, 2)
    placed.pipe.close()
    return values(placed.views)


@pytest.mark.slow
def test_a_step_that_fails_behind_its_gathers_is_repeated() -> None:
    wanted, _ = train_whole(2)
    for found in check(run_ranks(2, fail_between)):
        for name, value in found.items():
            assert float((value - wanted[name]).abs().max()) <= 1e-12, name


def test_a_gradient_that_comes_after_its_reduction_is_refused() -> None:
    """As of a parameter that a layer reads without having it: its bucket does not wait for that layer."""
    param = nn.Parameter(torch.zeros(3))
    bucket = GradientBucket.whole([(param,)], None)
    bucket.begin()
    bucket.add(0, torch.ones(3))
    bucket.complete()
    with pytest.raises(ValueError, match="among its modules; register it there, too"):
        bucket.add(0, torch.ones(3))
