"""The autograd edge at which a backward starts. The tensor itself can be freed."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge


def edge_of(tensor: Tensor) -> GradientEdge:
    """Returns a tensor's gradient edge. torch's function is slower than a small layer; only Python nodes need it."""
    node = tensor.grad_fn
    if node is None or isinstance(node, BackwardCFunction):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)
