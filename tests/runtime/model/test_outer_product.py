"""A weight gradient that a GEMM adds to its main gradient, where torch has that kernel."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from counted.kernels import CalledKernels
from treadle.runtime.model import gradient_bucket
from treadle.runtime.model.gradient_bucket import GradientBucket, OuterProduct


@pytest.mark.parametrize(("dtype", "kernels"), [(torch.bfloat16, {"addmm": 1}), (torch.float32, {"mm": 1, "add_": 1})])
def test_where_the_gemm_sums_in_float32_it_adds(
    dtype: torch.dtype, kernels: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On meta tensors, for which torch has the kernel's checks of shapes and types; no CPU has the kernel."""
    monkeypatch.setattr(gradient_bucket, "_WIDE_GEMMS", ("meta",))
    param = nn.Parameter(torch.empty(32, 48, dtype=dtype, device="meta"))
    bucket = GradientBucket.whole([(param,)], None)
    bucket.begin()
    product = OuterProduct(*(torch.empty(64, n, dtype=dtype, device="meta") for n in (32, 48)))
    bucket.add(0, product)
    with CalledKernels() as called:
        bucket.add(0, product)
    assert bucket.main(0).dtype is torch.float32
    assert dict(called.kernels) == kernels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_on_a_cpu_the_product_is_what_it_was(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    param = nn.Parameter(torch.empty(32, 48, dtype=dtype))
    sums = []
    for made in (False, True):
        bucket = GradientBucket.whole([(param,)], None)
        bucket.begin()
        for seed in (3, 4):
            draw = torch.Generator().manual_seed(seed)
            product = OuterProduct(*(torch.randn(64, n, generator=draw).to(dtype) for n in (32, 48)))
            bucket.add(0, product.left.t() @ product.right if made else product)
        sums.append(bucket.main(0).clone())
    assert torch.equal(*sums)
