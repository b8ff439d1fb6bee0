"""The memory of a trained parameter, counted by tensors: after each part of a step, and what a norm adds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import treadle
from tests.support.cases import schedule_of, square_loss
from tests.support.devices import drawn
from tests.support.oracle import make_mesh
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from treadle.models.views import NamedView
from treadle.train.optim import OptimizerConfig, ShardedOptimizer

WIDTH, LAYERS, DP = 256, 4, 2
SLACK = 0.05
"""Bytes a parameter for all that does not grow with it: a batch, outputs, counts."""


class LargestMade(TorchDispatchMode):
    """The most elements of a tensor that an operation made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in given:
                self.num = max(self.num, each.numel())
        return made


def tensor_bytes() -> int:
    """The memory of all tensors of this process."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def stage_of(layers: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).bfloat16()


def pipe_of(stage: nn.Module) -> treadle.Pipeline:
    schedule, mesh = schedule_of("1f1b", 1, 2), make_mesh(1, DP)
    return treadle.Pipeline({0: stage}, schedule, mesh=mesh, loss_fn=square_loss, deadline_s=PATIENT_S)


def count(rank: int) -> dict[str, float]:
    """Bytes a parameter after each part of two steps, and the largest tensor that a clip makes."""
    x = torch.randn(2, WIDTH, dtype=torch.bfloat16)
    before = tensor_bytes()
    stage = stage_of()
    num = sum(param.numel() for param in stage.parameters())
    pipe = pipe_of(stage)
    views = [NamedView(name, param) for name, param in stage.named_parameters()]
    optimizer, found, largest = ShardedOptimizer(pipe, views, OptimizerConfig(bucket_mb=0.1)), {}, LargestMade()

    def after(what: str) -> None:
        found[what] = (tensor_bytes() - before) / num

    after("made")
    for step in range(2):
        pipe.step(x, x)
        after(f"backward {step}")
        with largest:
            optimizer.clip(0.1)
        optimizer.step(1e-3)
        after(f"update {step}")
        optimizer.zero_grad()
        after(f"end {step}")
    assert all(param.grad is None for param in stage.parameters())
    found["largest of a clip"] = largest.num
    pipe.close()
    return found


def test_a_bfloat16_parameter_takes_six_bytes_and_its_share_of_twelve_also_at_the_end_of_a_step() -> None:
    for found in check(run_ranks(DP, count)):
        most = found.pop("largest of a clip")
        assert most < WIDTH, "a number for each tensor, not one for each element"
        assert found.pop("made") <= 2 + 4 + 12 / DP + SLACK
        assert {what: value for what, value in found.items() if not 12 - SLACK <= value <= 12 + SLACK} == {}


def bring_an_optimizer(rank: int, *, sharded: bool) -> list[tuple[torch.dtype | None, bool]]:
    """For each parameter the type of its `.grad`, and whether that is the mean of the gradients of both replicas."""
    stage = stage_of(1)
    pipe = pipe_of(stage)
    if sharded:
        ShardedOptimizer(pipe, [NamedView(name, param) for name, param in stage.named_parameters()])
    batches = [drawn(torch.randn, 2, WIDTH, generator=torch.Generator().manual_seed(at)).bfloat16() for at in range(DP)]
    pipe.step(batches[rank], batches[rank])
    pipe.close()
    alone = stage_of(1)
    for batch in batches:
        for at in range(len(batch)):
            row = batch[at : at + 1]
            torch.autograd.backward(square_loss(alone(row), row) / (2 * DP))
    pairs = zip(stage.parameters(), alone.parameters(), strict=True)
    return [(None, False) if p.grad is None else (p.grad.dtype, _near(p.grad, other.grad)) for p, other in pairs]


def _near(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and float((one - other).abs().max()) <= 0.02 * float(other.abs().max())


@pytest.mark.parametrize(("sharded", "wanted"), [(False, (torch.bfloat16, True)), (True, (None, False))])
def test_grad_is_whole_in_the_parameters_type_where_no_sharded_optimizer_is(
    sharded: bool, wanted: tuple[torch.dtype | None, bool]
) -> None:
    assert check(run_ranks(DP, partial(bring_an_optimizer, sharded=sharded))) == [[wanted] * 2] * DP
