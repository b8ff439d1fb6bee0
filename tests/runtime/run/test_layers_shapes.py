"""Micro-batches of different lengths at the grain of layers: experts on several ranks, offload, padded exchanges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from tests.runtime.run.test_layers import EXPERTS, WIDTH, Case, expert_number, own_part, renumbered, whole_model
from tests.runtime.run.test_layers_padded import EP, PP, ep_mesh, padded_stages
from tests.support.cases import refusal
from tests.support.devices import DEVICE_TYPE, drawn
from tests.support.experts import named_grads
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from treadle.moe import MoELayer

NAMES = ("1f1b", "interleaved-overlap", "dualpipe", "dualpipev", "zb-v")
STEPS = ((5, 2, 9, 1, 4), (3, 8, 1, 2, 6))
"""The lengths of each step's micro-batches, over and over."""

Pairs = list[tuple[Tensor, Tensor]]


def pairs_of(step: int, replica: int, num_mb: int) -> Pairs:
    """Rows and targets. Ranks of an expert group have different lengths in the same micro-batch."""
    generator, lengths = torch.Generator().manual_seed(10 * step + replica), STEPS[step]
    pairs = []
    for mb in range(num_mb):
        shape = (2, lengths[(mb + 2 * replica) % len(lengths)], WIDTH)
        x, target = drawn(torch.randn, shape, generator=generator, dtype=torch.float64)
        pairs.append((x, target))
    return pairs


Ran = list[tuple[float, dict[tuple[int, str], Tensor]]]
"""For each step the loss, and a rank's gradients by stage and name."""


def run_steps(rank: int, cases: list[Case], saved: Any, num_steps: int) -> list[Ran]:
    return [run_case(rank, case, saved, num_steps) for case in cases]


def run_case(rank: int, case: Case, saved: Any, num_steps: int) -> Ran:
    mesh = init_device_mesh(DEVICE_TYPE, (case.pp, case.dp, case.ep), mesh_dim_names=("pp", "dp", "ep"))
    pp_rank, replica = divmod(rank, case.dp * case.ep)
    ep_rank, model = replica % case.ep, whole_model(case)
    placed = dict(enumerate(case.schedule.placement.stages[pp_rank]))
    stages: dict[int, nn.Module] = {chunk: own_part(model[stage], case, ep_rank) for chunk, stage in placed.items()}
    loss_fn = nn.functional.mse_loss
    pipe = treadle.Pipeline(
        stages, case.schedule, mesh=mesh, loss_fn=loss_fn, deadline_s=PATIENT_S, saved=saved, shapes="each"
    )
    ran = []
    for step in range(num_steps):
        for stage in stages.values():
            stage.zero_grad()
        pairs = pairs_of(step, replica, case.num_mb)
        loss = float(pipe.step([x for x, _ in pairs] if 0 in placed.values() else None, [y for _, y in pairs]))
        grads = {}
        for chunk, stage in stages.items():
            for name, grad in named_grads(stage):
                number = expert_number(name)
                full = name if number is None else renumbered(name, number + ep_rank * (EXPERTS // case.ep))
                assert grad is not None
                grads[placed[chunk], full] = grad.clone()
        ran.append((loss, grads))
    pipe.close()
    return ran


def one_process(case: Case, step: int) -> tuple[float, list[dict[str, Tensor | None]]]:
    """The mean over all micro-batches of all replicas, router losses included."""
    model, replicas, total = whole_model(case), case.dp * case.ep, 0.0
    for x, target in (pair for replica in range(replicas) for pair in pairs_of(step, replica, case.num_mb)):
        h, aux = x, torch.zeros((), dtype=torch.float64)
        for part in (part for stage in model for part in stage):
            if isinstance(part, MoELayer):
                h, loss = part.with_loss(h)
                aux = aux + loss
            else:
                h = part(h)
        share = (nn.functional.mse_loss(h, target) + aux) / (case.num_mb * replicas)
        torch.autograd.backward(share)
        total += share.item()
    return total, [dict(named_grads(stage)) for stage in model]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pp", "saved", "num_steps"), [(2, "offload", 2), pytest.param(4, "leave", 1, marks=pytest.mark.slow)]
)
def test_lengths_of_their_own_come_to_the_gradients_of_one_process(pp: int, saved: str, num_steps: int) -> None:
    cases = [Case(name, pp=pp, layers=1) for name in NAMES]
    ranks = check(run_ranks(pp * 2, run_steps, cases, saved, num_steps))
    for place, case in enumerate(cases):
        for step in range(num_steps):
            loss, wanted = one_process(case, step)
            for ran in ranks:
                got, grads = ran[place][step]
                assert got == pytest.approx(loss, rel=1e-10)
                for (stage, name), grad in grads.items():
                    want = wanted[stage][name]
                    want = want if want is not None else torch.zeros_like(grad)
                    most = 1e-10 * max(float(want.abs().max()), 1e-9)
                    assert float((grad - want).abs().max()) <= most, (case.name, step, stage, name)


PADDED_MB = 5


def padded_steps(rank: int, name: str) -> tuple[str, float, float]:
    """A step in which ranks of an expert group have different lengths, then one in which they have the same."""
    schedule, ep_rank = treadle.generate(name, pp=PP, microbatches=PADDED_MB), rank % EP
    model = padded_stages(schedule.placement.num_stages, EP, ep_rank)
    stages: dict[int, nn.Module] = {
        chunk: model[stage] for chunk, stage in enumerate(schedule.placement.stages[rank // EP])
    }
    loss_fn = nn.functional.mse_loss
    pipe = treadle.Pipeline(stages, schedule, mesh=ep_mesh(), loss_fn=loss_fn, deadline_s=PATIENT_S, shapes="each")
    inputs = [x for x, _ in pairs_of(0, ep_rank, PADDED_MB)]
    said = refusal(lambda: pipe.step(inputs, inputs))
    inputs = [x for x, _ in pairs_of(0, 0, PADDED_MB)]
    loss = float(pipe.step(inputs, inputs))
    pipe.close()
    whole = nn.Sequential(*padded_stages(schedule.placement.num_stages, 1, 0))
    with torch.no_grad():
        return said, loss, sum(float(loss_fn(whole(x), x)) for x in inputs) / PADDED_MB


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_ranks_that_exchange_without_counts_have_the_same_lengths(name: str) -> None:
    for said, loss, want in check(run_ranks(PP * EP, padded_steps, name)):
        assert "ranks of an expert group got inputs of different shapes for the same micro-batch" in said
        assert loss == pytest.approx(want, rel=1e-10)
