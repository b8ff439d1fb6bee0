"""Every schedule on real processes against the whole model in one: losses, gradients, and twice the same bits.

`pytest --schedule NAME` runs its case.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import treadle
from tests.support.oracle import (
    chunks_of,
    cut,
    grads_of,
    make_batch,
    make_mesh,
    make_stages,
    mean_loss,
    run_whole,
    worst,
)
from tests.support.ranks import check, run_ranks
from treadle.schedules import SCHEDULES, Size

MOST_DIFFERENCE = 1e-10


class Case(NamedTuple):
    """A schedule of some size."""

    name: str
    vpp: int
    num_mb: int


class Ran(NamedTuple):
    """What a rank saw of a step."""

    loss: float
    losses: list[float]
    finite: bool
    grads: dict[str, Tensor | None]


def cases(pp: int) -> list[Case]:
    """All schedules, in the sizes nearest to some that are not special."""
    found = []
    for name, family in SCHEDULES.items():
        for vpp, num_mb in [(v, m) for v in family.vpps or (2, 3) for m in (1, 2 * pp + 3)]:
            size = family.nearest(Size(pp, vpp, num_mb))
            if size is not None and size.pp == pp:
                found.append(Case(name, size.vpp, size.microbatches))
    return sorted(set(found))


def run_case(case: Case, pp: int, dp: int) -> Ran:
    """One step of a pipeline made afresh."""
    schedule = treadle.generate(case.name, pp=pp, vpp=case.vpp, microbatches=case.num_mb)
    stages = make_stages(schedule.placement.num_stages)
    mesh = make_mesh(pp, dp)
    pp_rank = mesh.get_local_rank("pp")
    pipe = treadle.Pipeline(chunks_of(schedule, pp_rank, stages), schedule, mesh=mesh, loss_fn=mean_loss)
    inputs, targets = make_batch(case.num_mb, mesh.get_local_rank("dp") if dp > 1 else 0)
    loss = pipe.step(inputs, targets)
    assert pipe.report is not None
    assert torch.equal(pipe.report.loss, loss)
    own = {number: stages[number] for number in schedule.placement.stages[pp_rank]}
    grads = [p.grad for stage in own.values() for p in stage.parameters()]
    assert not any(grad is not None and grad.requires_grad for grad in grads), "a gradient keeps a graph alive"
    ran = Ran(float(loss), pipe.report.losses.tolist(), pipe.report.finite, grads_of(own))
    pipe.close()
    return ran


def run_twice(rank: int, pp: int, dp: int, listed: list[Case]) -> list[tuple[Ran, bool]]:
    """Each case, and whether a second run had the same bits."""
    del rank
    both = [(run_case(case, pp, dp), run_case(case, pp, dp)) for case in listed]
    return [(first, same(first, second)) for first, second in both]


def same(first: Ran, second: Ran) -> bool:
    """Equal bit by bit."""
    grads = [(first.grads[name], second.grads[name]) for name in first.grads]
    equal = [a is b if a is None or b is None else torch.equal(a, b) for a, b in grads]
    return all(equal) and first[:3] == second[:3]


def whole(case: Case, pp: int, dp: int) -> tuple[list[float], dict[str, Tensor | None]]:
    """The losses and gradients of a single process."""
    num_stages = treadle.generate(case.name, pp=pp, vpp=case.vpp, microbatches=case.num_mb).placement.num_stages
    stages = make_stages(num_stages)
    batches = [make_batch(case.num_mb, replica) for replica in range(dp)]
    losses = run_whole(stages, cut(batches, case.num_mb), mean_loss)
    return losses, grads_of(dict(enumerate(stages)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_losses_and_gradients_are_those_of_a_single_process(name: str) -> None:
    for pp, dp in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2)):
        listed = [case for case in cases(pp) if case.name == name]
        assert bool(listed) == ((name, pp) != ("dualpipe", 1))
        ranks = check(run_ranks(pp * dp, run_twice, pp, dp, listed))
        for place, case in enumerate(listed):
            check_against_whole(case, pp, dp, [results[place] for results in ranks])


def check_against_whole(case: Case, pp: int, dp: int, ranks: list[tuple[Ran, bool]]) -> None:
    """What ranks saw of a case against a single process."""
    losses, grads = whole(case, pp, dp)
    mean = sum(losses) / len(losses)
    seen: set[str] = set()
    for rank, (ran, again) in enumerate(ranks):
        replica = rank % dp
        assert again, f"{case} on rank {rank}: two runs differ"
        assert ran.finite
        assert ran.loss == pytest.approx(mean, rel=MOST_DIFFERENCE), (case, rank)
        own = losses[replica * case.num_mb : (replica + 1) * case.num_mb]
        assert ran.losses == pytest.approx(own, rel=MOST_DIFFERENCE), (case, rank)
        difference, where = worst(ran.grads, grads)
        assert difference <= MOST_DIFFERENCE, f"{case} on rank {rank}: {where} differs by {difference}"
        seen |= set(ran.grads)
    assert seen == set(grads)
    assert len({ran.loss for ran, _ in ranks}) == 1
