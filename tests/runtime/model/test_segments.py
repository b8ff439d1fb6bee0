"""The contract of layers in segments, in one process."""

from __future__ import annotations

import pytest
import torch

from treadle.moe import MoELayer
from treadle.runtime.model.recompute import Kept, LayerBuffers
from treadle.runtime.model.saved.saved_store import InPlace
from treadle.runtime.model.seeding import RandomState
from treadle.runtime.model.segments import Cut, Value, compute, reference_forward


def test_reference_forward_of_an_moe_layer_is_its_forward() -> None:
    torch.manual_seed(0)
    layer = MoELayer(8, 12, 4, balance=0.1).double()
    x = torch.randn(6, 8, dtype=torch.float64)
    values = reference_forward(layer, x)
    out, loss = layer.with_loss(x)
    assert torch.equal(values["x"], out)
    assert torch.equal(values["aux_loss"], loss)


@pytest.mark.parametrize("again", [False, True])
def test_a_value_that_is_written_to_before_it_is_read_is_refused(again: bool) -> None:
    """A segment that returns one buffer for all micro-batches: another one's comes before the next segment reads."""
    buffer = torch.zeros(3)
    attn = compute("attn", lambda x: buffer.copy_(x), reads="x", writes="h")
    mlp = compute("mlp", torch.tanh, reads="h", writes="x")
    values = [{"x": Value(torch.full((3,), float(mb)), False)} for mb in range(2)]
    for each in values:
        Cut.forward(attn, each)
    random, buffers = RandomState(torch.device("cpu")), LayerBuffers(torch.nn.Identity())
    with pytest.raises(ValueError, match="the value 'h' was written to before segment mlp read it"):
        Kept.forward(mlp, values[0], InPlace, random, buffers) if again else Cut.forward(mlp, values[0])
    Cut.forward(mlp, values[1])
    assert torch.equal(values[1]["x"].thing, torch.tanh(torch.ones(3)))


def test_a_value_that_one_segment_changes_is_refused_to_the_next() -> None:
    """In place for the first reader, which is no more than a part of what the second would need a gradient of."""
    values = {"x": Value(torch.ones(3), True)}
    Cut.forward(compute("attn", lambda x: x.mul_(2.0), reads="x", writes="h"), values)
    with pytest.raises(ValueError, match="the value 'x' was written to before segment mlp read it"):
        Cut.forward(compute("mlp", torch.add, reads="h x", writes="x"), values)
