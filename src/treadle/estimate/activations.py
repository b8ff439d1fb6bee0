"""Activations: the bytes that each block saves for its backward, and those it needs only while it computes.

One micro-batch on one rank. What is saved is listed by `treadle.estimate.block_parts`. Tensor parallelism cuts what is
inside attention and MLPs, and with sequence parallelism the rest too. Operands of GEMMs are saved in the GEMMs'
precision, all else in BF16.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from treadle.estimate.block_parts import BlockPiece, SavedTensor, block_parts
from treadle.estimate.job import Job
from treadle.estimate.model_cut import ModelCut
from treadle.estimate.work import BF16, FP32

OPERAND_BYTES = {"bf16": 2.0, "fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}
"""Bytes of an element of a saved operand of a GEMM, with its scales."""

_CACHED_FP8 = 1 + 4 / 128
"""Bytes of an element that is saved in FP8, with an FP32 scale for each 128."""

ROUTER_BYTES = BF16 + FP32 + FP32 + 1
"""Saved a token and expert: logits, scores, probabilities and the routing map."""


@dataclass(frozen=True)
class ActivationCut:
    """All that the activations of a block depend on."""

    model: ModelCut
    precision: str
    recompute: tuple[str, ...]
    offload: tuple[str, ...]
    gathered_output: bool
    """Attention saves its output once more, as its all-to-all left it (context parallelism of kind a2a)."""

    saved: str
    """`Job.saved`."""

    fused_loss: bool
    """The loss overwrites the logits with their gradient. Otherwise it keeps their softmax in FP32."""

    @classmethod
    def of(cls, job: Job, cp_comm_type: str, *, fused_loss: bool) -> ActivationCut:
        """Return that of a job."""
        gathered_output = job.cp > 1 and cp_comm_type == "a2a"
        return cls(ModelCut.of(job), job.precision, job.recompute, job.offload, gathered_output, job.saved, fused_loss)

    @property
    def hidden(self) -> int:
        """Bytes of the hidden states on one rank, as they are between blocks."""
        return self.whole_hidden // self.model.sequence_tp

    @property
    def whole_hidden(self) -> int:
        """The same, gathered from all ranks of tp."""
        return self.model.tokens * self.model.shape.hidden_size * BF16

    @property
    def gathered(self) -> int:
        """Bytes of the hidden states that a GEMM gathers from other ranks; nothing where each has them."""
        return self.whole_hidden if self.model.sequence_tp > 1 else 0

    @property
    def logits(self) -> int:
        """Bytes of the logits as the loss leaves them."""
        return self.model.tokens * self.model.vocabulary * (BF16 if self.fused_loss else FP32)

    def size(self, tensors: Iterable[SavedTensor]) -> float:
        """Return the bytes of saved tensors."""
        bytes_of = {
            "bf16": BF16,
            "fp32": FP32,
            "gemm": OPERAND_BYTES[self.precision],
            "cached": BF16 if self.saved == "bf16" else _CACHED_FP8,
            "logits": BF16 if self.fused_loss else FP32,
            "router": ROUTER_BYTES,
        }
        kept = (tensor for tensor in tensors if self.gathered_output or not tensor.a2a_only)
        return sum(tensor.elements * bytes_of[tensor.kind] for tensor in kept)


class BlockActivations(NamedTuple):
    """Bytes of one block for one micro-batch on one rank."""

    saved: int
    """From its forward to its backward."""

    split: int
    """From dgrad to wgrad, where they are apart."""

    forward: int
    """At most beside what all forwards saved so far, while it computes forward."""

    backward: int
    """At most beside what is still saved, this block's included, while it computes backward."""

    again: int = 0
    """Of `backward`, what is recomputed."""

    offloaded: int = 0
    """Of `saved`, what is copied to the host and back."""


@lru_cache(maxsize=65536)
def block_activations(cut: ActivationCut, block: str) -> BlockActivations:
    """Return the bytes of a block: a letter of `treadle.ir.blocks`.

    Raises:
        ValueError: the letter names no block.

    """
    if block == "E":
        return BlockActivations(0, 0, 0, _embedding_gradient(cut))
    if block == "L":
        return _head(cut)
    if block in ("t", "d"):
        return _layer(cut, block)
    if block == "m":
        return _mtp(cut)
    raise ValueError(f"blocks are E, t, d, m and L, got {block!r}")


def checkpointed(cut: ActivationCut, block: str) -> BlockActivations:
    """Return the bytes of a layer or MTP block that keeps its inputs only and recomputes all else ("full").

    An MTP block has two inputs, and keeps what its head and loss save.
    """
    whole = block_activations(cut, block)
    if block != "m":
        again = whole.saved - cut.hidden
        backward = max(whole.forward, whole.backward) + again
        offloaded = cut.hidden if "attn_norm" in cut.offload else 0
        return BlockActivations(cut.hidden, whole.split, whole.forward, backward, offloaded=offloaded)
    head = _head(cut)
    kept = 2 * cut.hidden + head.saved
    layer = checkpointed(cut, "t")
    return BlockActivations(kept, whole.split, whole.forward, max(layer.backward - head.saved, whole.backward))


def saved_by_part(cut: ActivationCut, block: str) -> dict[str, list[SavedTensor]]:
    """Return the tensors that each part of a block saves where nothing is recomputed."""
    parts = block_parts(cut.model, block)
    return {name: [tensor for piece in pieces for tensor in piece.saved] for name, pieces in parts.items()}


def _layer(cut: ActivationCut, block: str) -> BlockActivations:
    """Return the bytes of a layer.

    wgrad needs inputs of GEMMs and gradients of their outputs. They wait as the GEMM takes them, in its precision, as
    Transformer Engine's delayed weight gradients do.
    """
    pieces = _pieces(cut, block)
    saved = [tensor for piece in pieces for tensor in piece.saved]
    kept = [tensor for tensor in saved if set(tensor.discarded_by).isdisjoint(cut.recompute)]
    discarded = cut.size(saved) - cut.size(kept)
    gradients = sum(piece.output_gradients for piece in pieces) * OPERAND_BYTES[cut.precision]
    forward, backward = _moe_peaks(cut) if cut.model.shape.is_moe and block == "t" else _mlp_peaks(cut)
    return BlockActivations(
        int(cut.size(kept)),
        int(cut.size(tensor for tensor in saved if tensor.for_wgrad) + gradients),
        int(forward),
        int(backward + discarded),
        int(discarded),
        int(cut.size(tensor for tensor in kept if tensor.offloaded_by in cut.offload)),
    )


def _pieces(cut: ActivationCut, block: str) -> list[BlockPiece]:
    return [piece for part in block_parts(cut.model, block).values() for piece in part]


def _mlp_peaks(cut: ActivationCut) -> tuple[float, float]:
    """Return what a dense layer needs beside what is saved: forward, backward.

    Backward holds the gradient of the layer's output and, at the worst of three moments: after the second GEMM, the
    gathered output gradient and the gradient of its input; after the activation, the gradients on both its sides,
    while the second GEMM's input is free; after the first GEMM, also the gathered norm output and its gradient, while
    the activation's input is free.
    """
    shape = cut.model.shape
    inner = cut.model.tokens * (shape.intermediate_size // cut.model.tp)
    act = inner * BF16
    first = 2 * act if shape.gated_mlp else act
    freed = inner * OPERAND_BYTES[cut.precision]
    moments = (cut.gathered + act, first + act - freed, cut.gathered + cut.whole_hidden - freed)
    return cut.gathered, cut.hidden + max(moments)


def _moe_peaks(cut: ActivationCut) -> tuple[float, float]:
    """Return what a layer with experts needs beside what is saved: forward, backward.

    Forward, as the experts' output is sorted back, four tensors of all routed tokens live: as permuted for the
    exchange, as received, as the experts left them, and sorted; and the output of shared experts. Backward, an exchange
    holds what it sends and what it receives.
    """
    shape = cut.model.shape
    inside = cut.model.routed_rows * shape.hidden_size * BF16
    sent = inside // cut.model.etp
    shared = cut.hidden if shape.shared_width else 0
    return 2 * sent + 2 * inside + shared, sent + inside + cut.hidden


def _embedding_gradient(cut: ActivationCut) -> int:
    """Return the gradient of the embedding in BF16, which is added to the main gradient afterwards."""
    return cut.model.vocabulary * cut.model.shape.hidden_size * BF16 + cut.whole_hidden


def _head(cut: ActivationCut) -> BlockActivations:
    """Return the bytes of final norm, head and loss.

    Backward, the head holds the gathered input, the gradient of it and that gradient's own part. A loss that is not
    fused overwrites its FP32 softmax with the gradient, and casts that.
    """
    logits = cut.model.tokens * cut.model.vocabulary * BF16
    saved = cut.size(tensor for piece in _pieces(cut, "L") for tensor in piece.saved)
    gradients = 0 if cut.fused_loss else logits
    own = cut.hidden if cut.model.sequence_tp > 1 else 0
    backward = gradients + cut.gathered + cut.whole_hidden + own
    return BlockActivations(int(saved), cut.hidden + logits, 0, backward)


def _mtp(cut: ActivationCut) -> BlockActivations:
    """Return the bytes of an MTP block: two norms, their joined outputs, a layer, and the head and loss again.

    Its backward frees the head's first, and ends with the gradient of the embedding.
    """
    layer, head = block_activations(cut, "t"), _head(cut)
    joined = int(cut.size(_pieces(cut, "m")[0].saved))
    saved = layer.saved + head.saved + joined
    return BlockActivations(
        saved,
        layer.split + head.split + joined // 2,
        layer.forward,
        max(layer.backward - head.saved, head.backward, _embedding_gradient(cut) - saved),
        layer.again,
    )
