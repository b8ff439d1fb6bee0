"""The contract of layers in segments, in one process."""

from __future__ import annotations

import torch

from treadle.moe import MoELayer
from treadle.runtime.model.segments import reference_forward


def test_reference_forward_of_an_moe_layer_is_its_forward() -> None:
    torch.manual_seed(0)
    layer = MoELayer(8, 12, 4, balance=0.1).double()
    x = torch.randn(6, 8, dtype=torch.float64)
    values = reference_forward(layer, x)
    out, loss = layer.with_loss(x)
    assert torch.equal(values["x"], out)
    assert torch.equal(values["aux_loss"], loss)
