"""Linear layers as work: the products of their forward and both halves of the backward, casts and launches."""

from __future__ import annotations

from typing import NamedTuple

from treadle.estimate.job import Job
from treadle.estimate.work import BF16, FP32, Gemm, OpWork, PartWork

_LAUNCHES = {
    "attn": (20, 30, 4),
    "dispatch": (8, 8, 0),
    "mlp": (8, 12, 2),
    "experts": (20, 28, 4),
    "combine": (8, 8, 0),
    "embed": (4, 4, 0),
    "head": (10, 12, 1),
}
"""Launches of a part: forward, input half, weight half; in proportion, not one for each kernel (`launch_us`)."""

_EAGER = {
    "none": {},
    "partial": {"attn": 0.2, "dispatch": 0.6, "mlp": 0.2},
    "whole": dict.fromkeys(_LAUNCHES, 0.0),
}
"""The share of a part's kernels that is launched one by one, by level of CUDA graphs; 1 where it is not named."""


class Projection(NamedTuple):
    """A linear layer on one rank, applied to `tokens` rows."""

    tokens: float
    inputs: int
    outputs: int
    groups: int = 1
    precision: str = ""


def make_part(
    job: Job, name: str, linears: tuple[Projection, ...], forward: OpWork, backward: OpWork, again: OpWork
) -> PartWork:
    """Return a part of these linear layers, with the work around them and what is computed again."""
    launches = launched(job, name)
    products = forward_products(linears), _input_half(linears), _weight_half(linears)
    casts = cast_inputs(job, linears), _cast_gradients(job, linears), 0.0
    experts = name == "experts"
    works = [
        OpWork(() if experts else product, product if experts else (), cast_bytes=cast, launches=each)
        for product, cast, each in zip(products, casts, launches, strict=True)
    ]
    parameters = sum(linear.inputs * linear.outputs * linear.groups for linear in linears)
    of_experts = parameters if experts else 0
    return PartWork(works[0] + forward, works[1] + backward, works[2], parameters - of_experts, of_experts, again)


def together(one: PartWork, other: PartWork) -> PartWork:
    """Return two parts as one."""
    return PartWork(
        one.f + other.f,
        one.b + other.b,
        one.w + other.w,
        one.parameters + other.parameters,
        one.expert_parameters + other.expert_parameters,
        one.again + other.again,
    )


def forward_products(linears: tuple[Projection, ...] | list[Projection]) -> tuple[Gemm, ...]:
    """Return the products of a forward."""
    return tuple(Gemm(each.tokens, each.outputs, each.inputs, each.groups, each.precision) for each in linears)


def _input_half(linears: tuple[Projection, ...]) -> tuple[Gemm, ...]:
    return tuple(Gemm(each.tokens, each.inputs, each.outputs, each.groups, each.precision) for each in linears)


def _weight_half(linears: tuple[Projection, ...]) -> tuple[Gemm, ...]:
    """Products of inputs and gradients, added to FP32 gradients: read and written."""
    return tuple(
        Gemm(each.inputs, each.outputs, each.tokens, each.groups, each.precision, 2 * FP32) for each in linears
    )


def cast_inputs(job: Job, linears: tuple[Projection, ...]) -> float:
    """Return the bytes of casting the inputs of products to the job's precision."""
    return _cast_bytes(job) * sum(each.tokens * each.inputs * each.groups for each in linears if not each.precision)


def _cast_gradients(job: Job, linears: tuple[Projection, ...]) -> float:
    """Bytes of casting the gradients of their outputs, for both halves of the backward."""
    return _cast_bytes(job) * sum(each.tokens * each.outputs * each.groups for each in linears if not each.precision)


def _cast_bytes(job: Job) -> float:
    """Of an element: read as BF16, written along rows and along columns."""
    return {"bf16": 0.0, "nvfp4": BF16 + 2 * 0.5}.get(job.precision, BF16 + 2 * 1.0)


def launched(job: Job, name: str) -> tuple[float, float, float]:
    """Return the launches of a part that no CUDA graph holds: forward, input half, weight half."""
    share = _EAGER[job.cuda_graph].get(name, 1.0)
    forward, backward, weight = _LAUNCHES[name]
    return share * forward, share * backward, share * weight
