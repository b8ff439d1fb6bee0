"""The sharded optimizer on real ranks: parameters, norms and memory, held to torch's optimizers in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.ranks import check, run_ranks
from tests.train.layouts import Layout, place, step_whole, values, views_of, whole_model
from treadle.train.optim import OptimizerConfig, ShardedOptimizer

STEPS, LR, MAX_NORM = 3, 0.02, 0.3
CONFIG = OptimizerConfig(eps=1e-6, bucket_mb=0.001)
LAYOUTS = [
    Layout(pp=2, dp=2),
    Layout(pp=1, ep=2, dp=2),
    Layout("dualpipe", pp=2, ep=2),
    Layout("dualpipev", pp=2, ep=2),
]
MORE = [Layout(pp=2, ep=2), Layout("dualpipe", pp=2, dp=2)]

Result = dict[str, Any]


def train(rank: int, layout: Layout) -> Result:
    placed = place(rank, layout)
    optimizer = ShardedOptimizer(placed.pipe, placed.views, CONFIG)
    norms = []
    for step in range(STEPS):
        placed.step(step)
        norms.append(float(optimizer.clip(MAX_NORM)))
        optimizer.step(LR)
        optimizer.zero_grad()
    placed.pipe.close()
    return {"values": values(placed.views), "norms": norms, "bytes": optimizer.state_bytes}


def train_all(rank: int, layouts: list[Layout]) -> list[Result]:
    return [train(rank, layout) for layout in layouts]


def decayed_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": CONFIG.weight_decay},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]


@cache
def train_whole(replicas: int) -> tuple[dict[str, Tensor], list[float]]:
    model = whole_model()
    optimizer = torch.optim.AdamW(decayed_groups(model), lr=LR, betas=CONFIG.betas, eps=CONFIG.eps)
    norms = []
    for step in range(STEPS):
        step_whole(model, step, replicas)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return values(list(views_of(list(model), 0))), norms


def num_trained() -> tuple[int, int]:
    """(elements of the model that train, those of them that are experts')."""
    named = [(name, param.numel()) for name, param in whole_model().named_parameters() if param.requires_grad]
    return sum(num for _, num in named), sum(num for name, num in named if ".experts." in name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts", [LAYOUTS, pytest.param(MORE, marks=pytest.mark.nightly)], ids=["every kind", "more"]
)
def test_steps_are_those_of_adamw_in_one_process(layouts: list[Layout]) -> None:
    """Three steps: the second uses a parameter that the others do not."""
    ranks = check(run_ranks(4, train_all, layouts))
    trained, in_experts = num_trained()
    for number, layout in enumerate(layouts):
        wanted, norms = train_whole(layout.dp * layout.ep)
        assert max(norms) > 2 * MAX_NORM, "clipping has something to do"
        results = [of_rank[number] for of_rank in ranks]
        for rank, result in enumerate(results):
            assert result["norms"] == pytest.approx(norms, rel=1e-11), (layout, rank)
            for name, value in result["values"].items():
                assert float((value - wanted[name]).abs().max()) <= 1e-12, (layout, rank, name)
        hold_copies_equal(results)
        assert sum(result["bytes"] for result in results) == trained * 2 * 8, "each element has its moments on one rank"
        if layout.pp == 1:
            mine = (trained - in_experts) / 4 + in_experts / 4
            assert all(abs(result["bytes"] - mine * 2 * 8) < 64 * 16 for result in results), layout


def hold_copies_equal(results: list[Result]) -> None:
    """A tensor is the same, bit by bit, on all ranks that have it, and a tied one under all its names."""
    seen: dict[str, Tensor] = {}
    for result in results:
        for name, value in result["values"].items():
            assert torch.equal(seen.setdefault(name, value), value), name
    assert torch.equal(seen["lm_head.weight"], seen["model.embed_tokens.weight"])
