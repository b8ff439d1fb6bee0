"""Muon by whole matrices and two-byte parameters with float32 masters, held to torch's.

AdamW bit by bit, Muon to rounding.

Gradients are drawn by the tensor's name, so that every layout has the same, to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.ranks import check, run_ranks
from tests.train.layouts import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    WIDTH,
    Layout,
    drawn,
    place,
    put_gradients,
    values,
    views_of,
    whole_model,
)
from treadle.train.optim import OptimizerConfig, ShardedOptimizer

STEPS, LR = 3, 0.05


@dataclass(frozen=True)
class Case:
    layout: Layout
    config: OptimizerConfig
    dtype: torch.dtype


ADAMW = OptimizerConfig(bucket_mb=0.001)
MUON = OptimizerConfig(name="muon", bucket_mb=0.001)
CASES = [
    Case(Layout(pp=2, dp=2), ADAMW, torch.bfloat16),
    Case(Layout(ep=2, dp=2), MUON, torch.float32),
    Case(Layout("dualpipe", pp=2, ep=2), MUON, torch.bfloat16),
    Case(Layout(pp=2, dp=2), MUON, torch.bfloat16),
]


def train(rank: int, case: Case) -> dict[str, Any]:
    placed = place(rank, case.layout, case.dtype)
    optimizer = ShardedOptimizer(placed.pipe, placed.views, case.config)
    for step in range(STEPS):
        put_gradients(optimizer, step)
        optimizer.step(LR)
        optimizer.zero_grad()
    placed.pipe.close()
    state = {name: part.tensor.clone() for name, part in optimizer.state_dict().items() if ".master." in name}
    return {"values": values(placed.views), "bytes": optimizer.state_bytes, "masters": state}


def train_cases(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [train(rank, case) for case in cases]


def train_whole(case: Case) -> dict[str, Tensor]:
    """Each tensor a parameter of its own, in float32, updated by torch's optimizers."""
    model, config = whole_model(case.dtype), case.config
    views = [view for view in views_of(list(model), 0) if view.name != "lm_head.weight"]
    masters = {view.name: view.of(view.tensor).detach().float() for view in views if view.tensor.requires_grad}
    by_muon = {
        name: master
        for name, master in masters.items()
        if config.name == "muon" and master.dim() == 2 and "embed" not in name
    }
    by_adamw = [master for name, master in masters.items() if name not in by_muon]
    groups = [
        {"params": [master for master in by_adamw if master.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [master for master in by_adamw if master.dim() < 2], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=LR, betas=config.betas, eps=config.eps)]
    if by_muon:
        optimizers.append(torch.optim.Muon(by_muon.values(), lr=LR, adjust_lr_fn="match_rms_adamw"))
    for step in range(STEPS):
        for name, master in masters.items():
            grad = drawn(name, master.shape, step)
            master.grad = grad.float() if grad is not None else None
        for optimizer in optimizers:
            optimizer.step()
    frozen = {view.name: view.of(view.tensor).detach() for view in views if not view.tensor.requires_grad}
    return frozen | {name: master.to(case.dtype) for name, master in masters.items()}


@pytest.mark.slow
def test_updates_are_torchs() -> None:
    ranks = check(run_ranks(4, train_cases, CASES))
    for number, case in enumerate(CASES):
        wanted = train_whole(case)
        wanted["lm_head.weight"] = wanted["model.embed_tokens.weight"]
        for rank, of_rank in enumerate(ranks):
            for name, value in of_rank[number]["values"].items():
                assert value.dtype == case.dtype
                if case.config.name == "muon":  # its iterations in bfloat16 round otherwise in a batch
                    rtol, atol = torch.finfo(case.dtype).eps, STEPS * LR * torch.finfo(torch.bfloat16).eps
                    torch.testing.assert_close(value, wanted[name], rtol=rtol, atol=atol)
                else:
                    assert torch.equal(value, wanted[name]), (case, rank, name)
        has_masters = [bool(of_rank[number]["masters"]) for of_rank in ranks]
        assert has_masters == [case.dtype == torch.bfloat16] * 4
        hold_memory(case, [of_rank[number]["bytes"] for of_rank in ranks])


def hold_memory(case: Case, sizes: list[int]) -> None:
    """Each element of the model has its masters and moments on one rank, and ranks have about the same."""
    views = [view for view in views_of(list(whole_model()), 0) if view.tensor.requires_grad]
    views = [view for view in views if view.name != "lm_head.weight"]
    total = 0
    for view in views:
        shape = view.of(view.tensor).shape
        moments = 1 if case.config.by_muon(view.name, len(shape)) else 2
        total += shape.numel() * 4 * (moments + (case.dtype == torch.bfloat16))
    assert sum(sizes) == total
    assert max(sizes) <= total / 4 * 1.2, "a matrix more or less"


def muon_on_one_rank(rank: int) -> dict[str, tuple[int, ...]]:
    placed = place(rank, Layout(), torch.float32)
    optimizer = ShardedOptimizer(placed.pipe, placed.views, MUON)
    placed.pipe.close()
    return {name: part.shape for name, part in optimizer.state_dict().items() if "momentum_buffer" in name}


@pytest.mark.slow
def test_each_experts_matrix_is_a_matrix_of_its_own() -> None:
    (found,) = check(run_ranks(1, muon_on_one_rank))
    experts = [name for name in found if ".experts." in name]
    assert len(experts) == LAYERS * EXPERTS * 3
    assert {found[name] for name in experts} == {(HIDDEN * WIDTH,)}
    assert len(found) == len(experts) + LAYERS * 2, "beside them a layer's linear and router"
