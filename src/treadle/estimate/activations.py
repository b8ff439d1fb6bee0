"""Activations: the bytes that each block saves for its backward, and those it needs only while it computes.

One micro-batch on one rank. Tensors are those that Megatron-core with Transformer Engine keeps: input and output of
each norm; queries, keys, values and output of attention (which is fused: no scores, one FP32 number a head and token);
input and output of the activation, fused as well. Tensor parallelism cuts what is inside attention and MLPs, and with
sequence parallelism the rest too. Inputs of products are saved in the products' precision, all else in BF16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from treadle.estimate.job import Job
from treadle.estimate.parameters import ModelCut

BF16 = 2
FP32 = 4

OPERAND_BYTES = {"bf16": 2.0, "fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}
"""Bytes of an element of a saved input of a product, with its scales."""

ROUTER_BYTES = BF16 + FP32 + FP32 + 1
"""Saved a token and expert: logits, scores, probabilities and the routing map."""


@dataclass(frozen=True)
class ActivationCut:
    """All that the activations of a block depend on."""

    model: ModelCut
    tokens: int
    """Of a micro-batch on one rank, before tp cuts the sequence."""

    sequence_tp: int
    """Ranks that cut along the sequence what tp leaves whole."""

    precision: str
    recompute: tuple[str, ...]
    gathered_output: bool
    """Attention saves its output once more, as its all-to-all left it (context parallelism of kind a2a)."""

    fused_loss: bool
    """The loss overwrites the logits with their gradient. Otherwise it keeps their softmax in FP32."""

    @classmethod
    def of(cls, job: Job, cp_comm_type: str, *, fused_loss: bool) -> ActivationCut:
        """Return what a job says."""
        return cls(
            ModelCut.of(job),
            job.tokens,
            job.tp if job.sequence_parallel else 1,
            job.precision,
            job.recompute,
            job.cp > 1 and cp_comm_type == "a2a",
            fused_loss,
        )

    @property
    def hidden(self) -> int:
        """Bytes of the hidden states on one rank, as they are between blocks."""
        return self.whole_hidden // self.sequence_tp

    @property
    def whole_hidden(self) -> int:
        """The same, gathered from all ranks of tp."""
        return self.tokens * self.model.shape.hidden_size * BF16

    @property
    def gathered(self) -> int:
        """Bytes of the hidden states that a product gathers from other ranks; nothing where each has them."""
        return self.whole_hidden if self.sequence_tp > 1 else 0


class SavedTensor(NamedTuple):
    """What one tensor takes, and which parts' recomputation discards it."""

    size: float
    parts: tuple[str, ...] = ()
    for_weights: bool = False
    """The weight half needs it: it is the input of a product."""


class BlockActivations(NamedTuple):
    """Bytes of one block for one micro-batch on one rank."""

    saved: int
    """From its forward to its backward."""

    split: int
    """From the input half of its backward to the weight half, where they are apart."""

    forward: int
    """At most beside what all forwards saved so far, while it computes forward."""

    backward: int
    """At most beside what is still saved, this block's included, while it computes backward."""

    again: int = 0
    """Of `backward`, what is computed again."""


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
        return _layer(cut, moe=cut.model.shape.is_moe and block == "t")
    if block == "m":
        return _mtp(cut)
    raise ValueError(f"blocks are E, t, d, m and L, got {block!r}")


def checkpointed(cut: ActivationCut, block: str) -> BlockActivations:
    """Return the bytes of a layer or MTP block that keeps its inputs only and computes all else again ("full").

    An MTP block has two inputs, and keeps what its head and loss save.
    """
    whole = block_activations(cut, block)
    if block != "m":
        again = whole.saved - cut.hidden
        return BlockActivations(cut.hidden, whole.split, whole.forward, max(whole.forward, whole.backward) + again)
    head = _head(cut)
    kept = 2 * cut.hidden + head.saved
    layer = checkpointed(cut, "t")
    return BlockActivations(kept, whole.split, whole.forward, max(layer.backward - head.saved, whole.backward))


def layer_tensors(cut: ActivationCut, *, moe: bool) -> tuple[list[SavedTensor], list[SavedTensor]]:
    """Return what attention and what the MLP or experts of a layer save, with what recomputation would discard."""
    return _mla(cut) if cut.model.shape.is_mla else _gqa(cut), _moe(cut) if moe else _mlp(cut)


@lru_cache(maxsize=65536)
def _layer(cut: ActivationCut, *, moe: bool) -> BlockActivations:
    attention, mlp = layer_tensors(cut, moe=moe)
    saved = attention + mlp
    discarded = sum(tensor.size for tensor in saved if not set(tensor.parts).isdisjoint(cut.recompute))
    forward, backward = _moe_peaks(cut) if moe else _mlp_peaks(cut)
    return BlockActivations(
        int(sum(tensor.size for tensor in saved) - discarded),
        int(sum(tensor.size for tensor in saved if tensor.for_weights) + _output_gradients(cut, moe=moe)),
        int(forward),
        int(backward + discarded),
        int(discarded),
    )


def _operand(cut: ActivationCut) -> float:
    return OPERAND_BYTES[cut.precision]


def _norm(cut: ActivationCut, part: str, *others: str) -> list[SavedTensor]:
    """Return input, output and FP32 factor of a norm in front of a product. Its input is the layer's own."""
    shape = cut.model.shape
    tokens = cut.tokens // cut.sequence_tp
    output = tokens * shape.hidden_size * _operand(cut)
    inside = ("layernorm", part, *others)
    return [SavedTensor(cut.hidden), SavedTensor(output, inside, True), SavedTensor(tokens * FP32, inside)]


def _core(cut: ActivationCut) -> list[SavedTensor]:
    """Return queries, keys, values, output and softmax factors of attention."""
    model, part = cut.model, ("attn", "mla_up_proj")
    heads = model.shape.num_attention_heads // model.tp
    inputs = model.query_width + model.key_width + model.value_width
    output = cut.tokens * model.output_width * BF16
    found = [
        SavedTensor(cut.tokens * inputs * BF16, part if model.shape.is_mla else ("attn",)),
        SavedTensor(output, ("attn",), True),
        SavedTensor(cut.tokens * heads * FP32, ("attn", "core_attn")),
    ]
    return [*found, SavedTensor(output, ("attn",))] if cut.gathered_output else found


def _gqa(cut: ActivationCut) -> list[SavedTensor]:
    return _norm(cut, "attn") + _core(cut)


def _mla(cut: ActivationCut) -> list[SavedTensor]:
    shape = cut.model.shape
    tokens = cut.tokens // cut.sequence_tp
    latents = tokens * (shape.q_lora_rank + shape.kv_lora_rank)
    return [
        *_norm(cut, "attn"),
        SavedTensor((latents + tokens * shape.qk_rope_head_dim) * BF16, ("attn",)),
        SavedTensor(latents * _operand(cut), ("attn", "mla_up_proj"), True),
        *_core(cut),
    ]


def _activated(cut: ActivationCut, tokens: int, width: int, *parts: str) -> list[SavedTensor]:
    """Return input and output of an MLP's activation. `parts`: the whole MLP's, then the activation's alone."""
    first = 2 if cut.model.shape.gated_mlp else 1
    return [
        SavedTensor(tokens * first * width * BF16, parts[:-1]),
        SavedTensor(tokens * width * _operand(cut), parts, True),
    ]


def _mlp(cut: ActivationCut) -> list[SavedTensor]:
    width = cut.model.shape.intermediate_size // cut.model.tp
    return [*_norm(cut, "mlp"), *_activated(cut, cut.tokens, width, "mlp", "mlp_act")]


def _routed(cut: ActivationCut) -> int:
    """Return the tokens that a rank's experts are sent, taken to be balanced."""
    shape = cut.model.shape
    return cut.tokens // cut.sequence_tp * shape.num_experts_per_tok


def _moe(cut: ActivationCut) -> list[SavedTensor]:
    shape, etp = cut.model.shape, cut.model.etp
    tokens, routed = cut.tokens // cut.sequence_tp, _routed(cut) * etp
    width = shape.moe_intermediate_size
    shared = shape.shared_width // cut.model.tp
    return [
        *_norm(cut, ""),
        SavedTensor(tokens * shape.num_experts * ROUTER_BYTES, ("moe",)),
        SavedTensor(routed * shape.hidden_size * _operand(cut), ("moe",), True),
        SavedTensor(routed * FP32, ("moe",)),
        *_activated(cut, routed, width // etp, "moe", "mlp", "moe_act"),
        *_activated(cut, cut.tokens, shared, "moe", "shared_experts", "mlp", "mlp_act"),
    ]


def _output_gradients(cut: ActivationCut, *, moe: bool) -> float:
    """Return the gradients of products' outputs, which the weight half needs beside their inputs.

    They wait as that product takes them, in its precision, as Transformer Engine's delayed weight gradients do.
    """
    model, shape = cut.model, cut.model.shape
    hidden = cut.tokens // cut.sequence_tp * shape.hidden_size
    attention = cut.tokens * (model.query_width + model.key_width + model.value_width) + hidden
    first = 2 if shape.gated_mlp else 1
    if not moe:
        return (attention + cut.tokens * first * (shape.intermediate_size // model.tp) + hidden) * _operand(cut)
    routed, width = _routed(cut) * model.etp, shape.moe_intermediate_size
    experts = routed * (first * width // model.etp + shape.hidden_size)
    shared = cut.tokens * first * (shape.shared_width // model.tp)
    return (attention + experts + shared + hidden) * _operand(cut)


def _mlp_peaks(cut: ActivationCut) -> tuple[float, float]:
    """Return what a dense layer needs beside what is saved: forward, backward.

    Backward holds the gradient of the layer's output and, at the worst of three moments: behind the second product, the
    gathered output gradient and the gradient of its input; behind the activation, the gradients on both its sides,
    while the second product's input is free; behind the first product, also the gathered norm output and its gradient,
    while the activation's input is free.
    """
    shape = cut.model.shape
    act = cut.tokens * (shape.intermediate_size // cut.model.tp) * BF16
    first = 2 * act if shape.gated_mlp else act
    freed = cut.tokens * (shape.intermediate_size // cut.model.tp) * _operand(cut)
    moments = (cut.gathered + act, first + act - freed, cut.gathered + cut.whole_hidden - freed)
    return cut.gathered, cut.hidden + max(moments)


def _moe_peaks(cut: ActivationCut) -> tuple[float, float]:
    """Return what a layer with experts needs beside what is saved: forward, backward.

    Forward, as the experts' output is sorted back, four tensors of all routed tokens live: as permuted for the
    exchange, as received, as the experts left them, and sorted; and the output of shared experts. Backward, an exchange
    holds what it sends and what it receives.
    """
    shape = cut.model.shape
    sent = _routed(cut) * shape.hidden_size * BF16
    inside = sent * cut.model.etp
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
    logits = cut.tokens * cut.model.vocabulary
    saved = 2 * cut.hidden + logits * (BF16 if cut.fused_loss else FP32)
    gradients = 0 if cut.fused_loss else logits * BF16
    own = cut.hidden if cut.sequence_tp > 1 else 0
    backward = gradients + cut.gathered + cut.whole_hidden + own
    return BlockActivations(saved, cut.hidden + logits * BF16, 0, backward)


def _mtp(cut: ActivationCut) -> BlockActivations:
    """Return the bytes of an MTP block: two norms, their joined outputs, a layer, and the head and loss again.

    Its backward frees the head's first, and ends with the gradient of the embedding.
    """
    layer, head = block_activations(cut, "t"), _head(cut)
    joined = 4 * cut.hidden
    saved = layer.saved + head.saved + joined
    return BlockActivations(
        saved,
        layer.split + head.split + joined // 2,
        layer.forward,
        max(layer.backward - head.saved, head.backward, _embedding_gradient(cut) - saved),
        layer.again,
    )
