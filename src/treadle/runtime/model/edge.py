"""Where a backward starts, without what it starts from: the tensor itself can go."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge


def edge_of(tensor: Tensor) -> GradientEdge:
    """As `get_gradient_edge`, which takes longer than a small layer's forward; only Python's nodes need its care."""
    node = tensor.grad_fn
    if node is None or isinstance(node, BackwardCFunction):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)
