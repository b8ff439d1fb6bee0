"""Batches, outputs and losses that do not fit are refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional

import treadle
from tests.support.cases import (
    ended_soon,
    pipeline,
    refusal,
    schedule_of,
)
from tests.support.oracle import (
    make_batch,
    make_mesh,
    make_stages,
)
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks


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
    ranks = check(run_ranks(2, bad_batches))
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
    pipe = pipeline(schedule, make_stages(2), mesh, deadline_s=PATIENT_S)
    inputs, targets = make_batch(4)
    pipe.step(inputs[:7] if rank == 0 else None, targets)
    return "not refused"


def test_a_batch_that_does_not_fit_on_one_rank_does_not_keep_the_others() -> None:
    ended_soon(run_ranks(2, bad_batch_on_one), 0, "inputs of 4 micro-batches")


def changing_shape(rank: int, name: str) -> None:
    """Micro-batch 2 has another shape."""
    del rank
    schedule, mesh = schedule_of(name, 2, 4), make_mesh(2)
    pipe = pipeline(schedule, make_stages(schedule.placement.num_stages), mesh, deadline_s=PATIENT_S)
    inputs, targets = (list(x.chunk(4)) for x in make_batch(4))
    inputs[2], targets[2] = inputs[2][:1], targets[2][:1]
    pipe.step(inputs, targets)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_an_output_that_changes_its_shape_is_refused(name: str) -> None:
    outcomes = run_ranks(2, changing_shape, name)
    ended_soon(outcomes, 0, "stage 0 returned (1, 3, 8) float64 for micro-batch 2, but (2, 3, 8) float64 before")
    error = outcomes[0].error
    assert error is not None
    assert "pad them, or make the Pipeline with shapes='each'" in error.message


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
    pipe = pipeline(schedule, [Returns(first, kind), last], mesh, deadline_s=PATIENT_S)
    pipe.step(*make_batch(2))


@pytest.mark.parametrize(
    ("kind", "match"), [("dict", "stage 0 returned dict"), ("number", "got float"), ("vector", "got a tensor of shape")]
)
def test_what_a_stage_may_not_return(kind: str, match: str) -> None:
    ended_soon(run_ranks(2, strange_returns, kind), 0, match)


def loss_per_token(rank: int) -> None:
    del rank
    schedule, mesh = schedule_of("1f1b", 2, 2), make_mesh(2)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")

    pipeline(schedule, make_stages(2), mesh, loss_fn, deadline_s=PATIENT_S).step(*make_batch(2))


def test_a_loss_that_is_no_number_is_refused() -> None:
    ended_soon(run_ranks(2, loss_per_token), 1, "a loss is one number for a micro-batch, got a tensor")
