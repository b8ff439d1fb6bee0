"""Matrices of one shape are orthogonalised in batches: torch's numbers, in fewer calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from treadle.train.optim import batched_muon
from treadle.train.optim.batched_muon import BatchedMuon, orthogonalised

SHAPES = [(6, 8)] * 7 + [(8, 6)] * 3 + [(64, 48)] * 5 + [(3, 3)]
SETTINGS: list[dict[str, Any]] = [
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.1},
    {"adjust_lr_fn": "original", "nesterov": False, "ns_steps": 3, "weight_decay": 0.0},
]


class Gemms(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func._schema.name.removeprefix("aten::") in ("mm", "addmm", "bmm", "baddbmm")
        return func(*args, **(kwargs or {}))


def trained(kind: type[torch.optim.Muon], settings: dict[str, Any]) -> tuple[list[Tensor], int]:
    """The parameters after three steps, some of them without a gradient in the second; the GEMMs of the last."""
    generator = torch.Generator().manual_seed(3)
    params = [torch.randn(shape, generator=generator) for shape in SHAPES]
    muon = kind(params, lr=0.02, **settings)
    for param in params:
        muon.state[param] = {"momentum_buffer": torch.zeros_like(param)}
    for step in range(3):
        for number, param in enumerate(params):
            drawn = torch.randn(param.shape, generator=generator)
            param.grad = None if step == 1 and number % 4 == 0 else drawn
        with Gemms() as gemms:
            muon.step()  # type: ignore[no-untyped-call]
    return params, gemms.num


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("batch", [2**24, 2 * 48])
def test_updates_are_torchs(settings: dict[str, Any], batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_muon, "BATCH", batch)
    (mine, _), (wanted, _) = trained(BatchedMuon, settings), trained(torch.optim.Muon, settings)
    for one, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.02 * 2**-8)


def test_matrices_of_one_shape_share_their_iterations() -> None:
    (_, batched), (_, one_by_one) = trained(BatchedMuon, SETTINGS[0]), trained(torch.optim.Muon, SETTINGS[0])
    assert (batched, one_by_one) == (5 * 3 * len({*SHAPES}), 5 * 3 * len(SHAPES))


def test_matrices_of_a_batch_do_not_mix() -> None:
    group = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5, "eps": 1e-7}
    matrices = torch.randn(4, 5, 7, dtype=torch.float64) * torch.tensor([1e-6, 1.0, 1e3, 0.0]).view(-1, 1, 1)
    together = orthogonalised(matrices.clone(), group)
    for number in range(4):
        alone = orthogonalised(matrices[number : number + 1].clone(), group)[0]
        torch.testing.assert_close(together[number], alone)
    assert together[3].eq(0).all()
