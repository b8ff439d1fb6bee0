"""Causal attention within documents, and which kernel runs it.

| kernel | runs | where |
|---|---|---|
| causal | scaled_dot_product_attention, is_causal | each sequence is one document |
| varlen | torch.nn.attention.varlen, all documents in one launch | CUDA, capability 8 or more, two-byte types |
| documents | the causal kernel, document by document | elsewhere |
| mask | scaled_dot_product_attention with a mask of all pairs of tokens | elsewhere, for many tiny documents |

The first three save queries, keys, values, outputs and a number a row for the backward. The mask is saved by each
layer, and grows with the square of the tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import handle_torch_function, has_torch_function_unary

from treadle.models.document_lengths import Documents

AttentionKernel: TypeAlias = Literal["causal", "varlen", "documents", "mask"]

_TINY = 16
"""Documents of fewer tokens than this on average are masked: a launch for each takes longer."""

_FLASH_TYPES = (torch.float16, torch.bfloat16)
_FLASH_WIDTH = 256
_FLASH_CAPABILITY = 8
CAUSAL = (-1, 0)
"""`varlen_attn`'s window in which a token sees those before it."""


def attention_kernel(
    device: torch.device, dtype: torch.dtype, widths: tuple[int, int], documents: Documents | None
) -> AttentionKernel:
    """Return the kernel of a device, for heads of so many numbers (of queries and keys, of values).

    Example:
        >>> packed = Documents(((2000, 2096),))
        >>> attention_kernel(torch.device("cpu"), torch.float32, (128, 128), packed)
        'documents'

    """
    if documents is None or documents.is_one_each:
        return "causal"
    if _takes_flash(device, dtype, widths):
        return "varlen"
    num = len(documents.flat)
    return "mask" if sum(documents.flat) < _TINY * num else "documents"


def _takes_flash(device: torch.device, dtype: torch.dtype, widths: tuple[int, int]) -> bool:
    of_queries, of_values = widths
    fits = of_queries == of_values <= _FLASH_WIDTH and of_queries % 8 == 0
    return device.type == "cuda" and dtype in _FLASH_TYPES and fits and _is_capable(device)


@lru_cache
def _is_capable(device: torch.device) -> bool:
    """Return whether torch's flash kernels run on a device; a dry run plans for one that may not be here."""
    if torch.version.hip is not None:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] >= _FLASH_CAPABILITY


def attend(query: Tensor, key: Tensor, value: Tensor, documents: Documents | None) -> Tensor:
    """Return [batch, tokens, heads, width] for as much of queries, keys and values, the last two of fewer heads."""
    if has_torch_function_unary(query):  # a dry run counts another device's kernel
        made: Tensor = handle_torch_function(attend, (query,), query, key, value, documents)
        return made
    kernel = attention_kernel(query.device, query.dtype, (query.shape[-1], value.shape[-1]), documents)
    return attend_by(kernel, query, key, value, documents)


def attend_by(
    kernel: AttentionKernel, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None
) -> Tensor:
    """Run a kernel."""
    if kernel == "causal":
        return _causal(query, key, value)
    assert documents is not None, "a sequence is several documents"
    if kernel == "varlen":
        return _varlen(query, key, value, documents)
    if kernel == "mask":
        return _masked(query, key, value, documents)
    flat = (torch.split(x.flatten(0, 1), documents.flat) for x in (query, key, value))
    each = [_causal(*(part.unsqueeze(0) for part in parts)).squeeze(0) for parts in zip(*flat, strict=True)]
    return torch.cat(each).view(*query.shape[:-1], -1)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)


def _masked(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    positions = documents.positions(query.device)
    at = torch.arange(positions.shape[-1], device=query.device)
    begin = (at - positions).unsqueeze(-1)  # of each token's document
    mask = ((begin == begin.mT) & (at.unsqueeze(-1) >= at)).unsqueeze(1)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def _varlen(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = documents.ends(query.device), max(documents.flat)
    shape = query.shape
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    made = varlen_attn(query, key, value, ends, ends, longest, longest, window_size=CAUSAL, enable_gqa=True)
    assert isinstance(made, Tensor), "without auxiliary outputs"
    return made.view(shape)
