"""Attention within documents: each kernel against the mask in float64, which kernel runs where, what it saves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from treadle.models import Documents
from treadle.models.attend import AttentionKernel, attend, attend_by, attention_kernel
from treadle.models.on_meta import AttentionOf

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PACKED = Documents(((5, 1, 18), (24,), (1, 1, 22)))
TINY = Documents(((1,) * 24,))


def drawn(dtype: torch.dtype, documents: Documents) -> list[Tensor]:
    """Queries of four heads; keys and values of two."""
    draw = torch.Generator().manual_seed(4)
    size = len(documents.lengths), sum(documents.lengths[0])
    return [
        torch.randn(*size, heads, 16, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]


def by_formula(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """Each document by itself, in float64."""
    rows = []
    for row, lengths in enumerate(documents.lengths):
        ends = torch.tensor(lengths).cumsum(0).tolist()
        for first, last in zip([0, *ends], ends, strict=False):
            q, k, v = (x[row, first:last].double() for x in (query, key, value))
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
            later = torch.ones(last - first, last - first, dtype=torch.bool).triu(1)
            rows.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v))
    return torch.cat(rows).view(query.shape)


def same_as_formula(kernel: AttentionKernel, dtype: torch.dtype, documents: Documents, most: float) -> None:
    values, twins = drawn(dtype, documents), [x.detach().double().requires_grad_() for x in drawn(dtype, documents)]
    (query, key, value), (q, k, v) = values, twins
    made, wanted = attend_by(kernel, query, key, value, documents), by_formula(q, k, v, documents)
    grad = torch.cos(torch.arange(made.numel())).view_as(made)
    torch.autograd.backward(made, grad.to(dtype))
    torch.autograd.backward(wanted, grad.double())
    pairs = [(made, wanted), *((x.grad, y.grad) for x, y in zip(values, twins, strict=True))]
    for got, want in pairs:
        assert got is not None
        assert want is not None
        assert got.dtype is dtype
        assert float((got.detach().double() - want.detach()).abs().max()) <= most * max(
            1.0, float(want.detach().abs().max())
        )


@pytest.mark.parametrize("kernel", ["documents", "mask"])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_a_kernel_is_the_formula(kernel: AttentionKernel, dtype: torch.dtype, most: float) -> None:
    same_as_formula(kernel, dtype, PACKED, most)
    same_as_formula(kernel, dtype, TINY, most)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_document_is_causal(dtype: torch.dtype) -> None:
    same_as_formula("causal", dtype, Documents(((24,), (24,))), 0.02 if dtype is torch.bfloat16 else 1e-12)


def test_the_kernel_of_a_device() -> None:
    half, widths, packed = torch.bfloat16, (128, 128), Documents(((400, 624),))
    assert attention_kernel(CPU, half, widths, None) == "causal"
    assert attention_kernel(CUDA, half, widths, Documents(((24,), (24,)))) == "causal"
    assert attention_kernel(CPU, half, widths, packed) == "documents"
    assert attention_kernel(CPU, half, widths, TINY) == "mask"
    if torch.version.hip is None and not torch.cuda.is_available():  # as of a device that a dry run plans for
        assert attention_kernel(CUDA, half, widths, packed) == "varlen"
        assert attention_kernel(CUDA, half, widths, TINY) == "varlen"
    assert attention_kernel(CUDA, torch.float32, widths, packed) == "documents"
    assert attention_kernel(CUDA, half, (192, 128), packed) == "documents"
    assert attention_kernel(CUDA, half, (512, 512), packed) == "documents"


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """The bytes of all storages that autograd saves."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage
        return tensor

    @property
    def total(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_saved_grows_with_the_tokens(device: str) -> None:
    """On the meta device, by the kernel that runs on each device."""
    sizes = []
    for num in (1024, 4096):
        documents = Documents(((num // 4,) * 4,))
        values = [torch.empty(1, num, h, 16, dtype=torch.bfloat16, device="meta").requires_grad_() for h in (4, 2, 2)]
        saved = Saved()
        with AttentionOf(torch.device(device)), saved:
            attend(values[0], values[1], values[2], documents)
        sizes.append(saved.total)
    assert sizes[1] <= 4.1 * sizes[0]


def test_a_dry_run_counts_what_a_cpu_saves() -> None:
    documents, sizes = Documents(((300, 212),)), []
    for device in ("meta", "cpu"):
        values = [torch.ones(1, 512, h, 16, device=device).requires_grad_() for h in (4, 2, 2)]
        saved = Saved()
        with AttentionOf(CPU), saved:
            attend(values[0], values[1], values[2], documents)
        sizes.append(saved.total)
    assert sizes[0] == sizes[1]


def test_numbers_of_documents_stay_on_the_host() -> None:
    with pytest.raises(ValueError, match=r"numbers of documents are on meta.*Documents\.of\(numbers\.cpu\(\)\)"):
        Documents.of(torch.zeros(1, 4, dtype=torch.long, device="meta"))


class FlashOnCpu:
    """torch's variable-length kernels on a CPU.

    `forward`: torch/nn/attention/varlen.py, `_varlen_attn` (its call of `aten._flash_attention_forward`): out as query,
    lse [heads, tokens], a zero state of the generator. `backward`: `_varlen_attn_backward` of the same file.
    """

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: Tensor,
        ends_k: Tensor,
        longest: int,
        longest_k: int,
        *rest: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        is_causal, scale, window, enable_gqa, *unused = rest
        assert (is_causal, scale, window, enable_gqa, any(unused)) == (True, None, [-1, 0], True, False)
        lengths = ends.diff().tolist()
        assert query.dtype is key.dtype is value.dtype is torch.bfloat16
        assert ends.dtype is ends_k.dtype is torch.int32
        assert longest == longest_k == max(lengths)
        assert (int(ends[0]), int(ends[-1])) == (0, len(query))
        made = by_formula(query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), Documents((tuple(lengths),)))
        lse = query.new_zeros(query.shape[1], len(query), dtype=torch.float32)
        return made.squeeze(0).to(query.dtype), lse, torch.zeros(2, dtype=torch.uint64)

    @staticmethod
    def backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, ends: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        assert rest[3] is True  # causal
        made = tuple(torch.zeros_like(x, dtype=torch.float64) for x in (query, key, value))
        numbers = torch.arange(len(ends) - 1).repeat_interleave(ends.diff())
        unseen = (numbers.unsqueeze(1) != numbers) | torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
        for head in range(query.shape[1]):
            of_key, scale = head * key.shape[1] // query.shape[1], query.shape[-1] ** -0.5
            q, k, v, g = (x[:, at].double() for x, at in ((query, head), (key, of_key), (value, of_key), (grad, head)))
            weights = (q @ k.t() * scale).masked_fill(unseen, float("-inf")).softmax(-1)
            scores = weights * (g @ v.t() - (g * (weights @ v)).sum(-1, keepdim=True)) * scale
            made[0][:, head] += scores @ k
            made[1][:, of_key] += scores.t() @ q
            made[2][:, of_key] += weights.t() @ g
        return tuple(x.to(query.dtype) for x in made)


@pytest.fixture
def _flash() -> Iterator[None]:
    with torch.library._scoped_library("torch_attn", "IMPL") as library:
        library.impl("_varlen_attn", FlashOnCpu.forward, "CPU")
        library.impl("_varlen_attn_backward", FlashOnCpu.backward, "CPU")
        yield


@pytest.mark.usefixtures("_flash")
def test_varlen_is_called_as_torch_documents_it() -> None:
    assert varlen.varlen_attn is not None
    same_as_formula("varlen", torch.bfloat16, PACKED, 0.02)
