"""What the checker itself does with tensors is not noted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def not_noted() -> Iterator[None]:
    """Runs a block without the modes that note kernels, and without a graph."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield
