"""What a block of a model is made of: its linear layers, the tensors that it saves, its messages, the bytes it touches.

One micro-batch on one rank. A block (a letter of `treadle.ir.blocks`) has parts, named as ops and costs name them
(attn, dispatch, mlp, combine, embed, head, mtp); a part has one piece or more. Parameters, FLOPs, saved bytes, messages
and times are read from pieces:

    piece    linear layers                             in the blocks
    attn     qkv, proj (MLA: q, kv, up, down), router  t d m
    mlp      fc1, fc2                                  d, t of a dense model; shared experts of t and m
    experts  fc1, fc2, grouped                         t m of a model with experts
    embed    embedding, positions                      E
    head     head                                      L m

Saved tensors are those that Megatron-core with Transformer Engine keeps: input and output of each norm; queries, keys,
values and output of attention (which is fused: no scores, one FP32 number a head and token); input and output of the
activation, fused as well. Experts are taken to be balanced.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from treadle.estimate.model_cut import ModelCut
from treadle.estimate.work import BF16, FP32


class Linear(NamedTuple):
    """A linear layer on one rank: `copies` weights [outputs, inputs], of experts more than one.

    `rows` are those that all copies take together; 0 where rows of the weight are looked up, not multiplied.
    """

    name: str
    rows: int
    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1
    precision: str = ""
    """"" where it is the job's."""

    fused: bool = True
    """Its weight gradient is added to the main gradient inside the GEMM (gradient_accumulation_fusion)."""

    @property
    def weights(self) -> int:
        """Elements of the weight matrices."""
        return self.copies * self.outputs * self.inputs

    @property
    def size(self) -> int:
        """Parameters, with biases."""
        return self.copies * self.outputs * (self.inputs + self.bias)


class SavedTensor(NamedTuple):
    """A tensor that a forward saves for its backward."""

    elements: int
    kind: str
    """bf16, fp32, gemm (an operand, in the GEMMs' precision), cached (`Job.saved`), logits or router."""

    discarded_by: tuple[str, ...] = ()
    """Names of `Job.recompute` that recompute it."""

    for_wgrad: bool = False
    """wgrad needs it: it is the input of a GEMM."""

    a2a_only: bool = False
    """Saved where context parallelism exchanges by all-to-all."""

    offloaded_by: str = ""
    """The module of `Job.offload` that copies it to the host; "" in blocks that are no layers."""


class BlockMessage(NamedTuple):
    """A message of a group, and how often a forward and a backward send it."""

    kind: str
    """all_gather, reduce_scatter, ring (of context parallelism) or all_to_all (to experts)."""

    group: str
    size_bytes: int
    """Of the whole tensor; of a ring and an all-to-all, what a rank brings."""

    forward: int = 1
    backward: int = 1


class Recomputed(NamedTuple):
    """What the backward does once more where `Job.recompute` has one of `names`: less than a whole part."""

    names: tuple[str, ...]
    linears: tuple[Linear, ...] = ()
    vector_bytes: int = 0
    attention: bool = False
    casts: bool = False
    permuted_bytes: int = 0
    collectives: tuple[BlockMessage, ...] = ()
    whole: bool = False
    """All of the piece: what follows is in it."""


class BlockPiece(NamedTuple):
    """A piece of a block."""

    kind: str
    linears: tuple[Linear, ...] = ()
    norms: int = 0
    """Parameters of norms."""

    saved: tuple[SavedTensor, ...] = ()
    output_gradients: int = 0
    """Elements of gradients of GEMMs' outputs, which wgrad needs beside their inputs."""

    pair_width: int = 0
    """Multiplications of attention for a pair of tokens, over all heads of the model."""

    vector_bytes: int = 0
    """Read and written in a forward by norms, activations, positions, residuals and losses."""

    backward_vector_bytes: int = 0
    permuted_bytes: int = 0
    """Read and written to sort tokens by expert, and back; in a forward, and in a backward."""

    collectives: tuple[BlockMessage, ...] = ()
    recomputed: tuple[Recomputed, ...] = ()
    held: bool = True
    """False where another block holds its parameters."""


@lru_cache(maxsize=4096)
def block_parts(cut: ModelCut, block: str) -> Mapping[str, tuple[BlockPiece, ...]]:
    """Return the parts of a block, each with its pieces.

    Args:
        cut: the model, how it is cut, and the tokens of a micro-batch.
        block: a letter of `treadle.ir.blocks`: t (a layer, with experts if the model has them), d, E, m or L.

    Raises:
        ValueError: the letter names no block.

    Example:
        >>> from treadle.estimate import load_model
        >>> parts = block_parts(ModelCut(load_model("llama3-70b"), tp=8), "t")
        >>> [(name, [linear.name for linear in piece.linears]) for name, (piece,) in parts.items()]
        [('attn', ['qkv', 'proj']), ('mlp', ['mlp_fc1', 'mlp_fc2'])]

    """
    shape = cut.shape
    if block == "E":
        return {"embed": (_embedding(cut),)}
    if block == "L":
        return {"head": (_head(cut),)}
    if block == "m":
        layer = (piece for part in block_parts(cut, "t").values() for piece in part)
        return {"mtp": (_mtp_projection(cut), _head(cut)._replace(held=False), *layer)}
    if block == "d" or (block == "t" and not shape.is_moe):
        return {"attn": (_attention(cut),), "mlp": (_mlp(cut),)}
    if block == "t":
        shared = (_shared_experts(cut),) if shape.shared_width else ()
        return {
            "attn": (_attention(cut, router=True),),
            "dispatch": (BlockPiece("dispatch", collectives=(_exchange(cut),)),),
            "mlp": (_experts(cut), *shared),
            "combine": (BlockPiece("combine", collectives=(_exchange(cut),)),),
        }
    raise ValueError(f"blocks are E, t, d, m and L, got {block!r}")


def _norm_parameters(cut: ModelCut) -> int:
    """LayerNorm has biases, RMSNorm has none."""
    return cut.shape.hidden_size * (2 if cut.shape.max_position_embeddings else 1)


def _norm(cut: ModelCut, modules: tuple[str, str], *parts: str) -> tuple[SavedTensor, ...]:
    """Return input, output and FP32 factor of a norm in front of a GEMM. Its input is the layer's own.

    `modules` are the norm and what takes its output.
    """
    elements, inside = cut.own_tokens * cut.shape.hidden_size, ("layernorm", *parts)
    norm, after = modules
    return (
        SavedTensor(elements, "bf16", offloaded_by=norm),
        SavedTensor(elements, "gemm", inside, for_wgrad=True, offloaded_by=after),
        SavedTensor(cut.own_tokens, "fp32", inside, offloaded_by=norm),
    )


def _tp_collectives(cut: ModelCut) -> tuple[BlockMessage, ...]:
    """Return the collectives of tp around two linear layers: inputs gathered, outputs scattered; backward once more.

    With sequence parallelism inputs are gathered again for wgrad. Without it, an all-reduce moves as much.
    """
    size_bytes = BF16 * cut.tokens * cut.shape.hidden_size
    gathers = 2 if cut.sequence_tp > 1 else 1
    return BlockMessage("all_gather", "tp", size_bytes, 1, gathers), BlockMessage("reduce_scatter", "tp", size_bytes)


def _exchange(cut: ModelCut, times: int = 1) -> BlockMessage:
    """Return the all-to-all of dispatch or combine: the same in both directions, and both ways of the step."""
    return BlockMessage("all_to_all", "ep", BF16 * cut.own_tokens * cut.shape.hidden_size, times, times)


def _attention(cut: ModelCut, *, router: bool = False) -> BlockPiece:
    """Attention and both norms of a layer, its own and the one after it; with `router` that of experts."""
    shape, tokens = cut.shape, cut.tokens
    linears = _projections(cut)
    outer = cut.own_tokens * shape.hidden_size
    norms = BF16 * 2 * 2 * outer  # each reads and writes
    inner = sum(linear.rows * linear.outputs for linear in linears[:-1])
    vector = norms + BF16 * (3 * outer + 2 * inner)
    recomputed = [
        Recomputed(("core_attn",), attention=True),
        Recomputed(("layernorm",), vector_bytes=norms),
    ]
    if shape.is_mla:
        ups = tuple(linear for linear in linears if linear.name in ("q_up", "kv_up"))
        up_bytes = BF16 * 2 * cut.heads * tokens * shape.qk_nope_head_dim
        recomputed.append(Recomputed(("mla_up_proj",), ups, up_bytes))
    if router:
        size = cut.own_tokens, shape.hidden_size, shape.num_experts
        linears = (*linears, Linear("router", *size, shape.mlp_bias, precision="bf16", fused=False))
        vector += FP32 * 4 * shape.num_experts * cut.own_tokens
    keys = cut.key_width + cut.value_width
    width = shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim if shape.is_mla else 2 * shape.head_dim
    inside = shape.q_lora_rank + shape.kv_lora_rank if shape.is_mla else 2 * shape.head_dim * shape.qk_norm
    return BlockPiece(
        "attn",
        linears,
        2 * _norm_parameters(cut) + inside,
        _attention_tensors(cut),
        tokens * (cut.query_width + keys) + outer,
        shape.num_attention_heads * width,
        vector,
        2 * vector,
        collectives=(*_tp_collectives(cut), BlockMessage("ring", "cp", BF16 * tokens * keys, 1, 2)),
        recomputed=tuple(recomputed),
    )


def _projections(cut: ModelCut) -> tuple[Linear, ...]:
    """The linear layers of attention, the one after it last."""
    shape, tokens, own, hidden = cut.shape, cut.tokens, cut.own_tokens, cut.shape.hidden_size
    bias, query = shape.attention_bias or shape.qkv_bias, cut.query_width
    out = Linear("proj", tokens, cut.output_width, hidden, shape.attention_bias)
    if not shape.is_mla:
        return Linear("qkv", tokens, hidden, query + cut.key_width + cut.value_width, bias), out
    up_width = shape.num_attention_heads * (shape.qk_nope_head_dim + shape.v_head_dim) // cut.tp
    queries = (
        (
            Linear("q_down", own, hidden, shape.q_lora_rank, bias),
            Linear("q_up", tokens, shape.q_lora_rank, query),
        )
        if shape.q_lora_rank
        else (Linear("q", tokens, hidden, query),)
    )
    return (
        *queries,
        Linear("kv_down", own, hidden, shape.kv_lora_rank + shape.qk_rope_head_dim, bias),
        Linear("kv_up", tokens, shape.kv_lora_rank, up_width),
        out,
    )


def _attention_tensors(cut: ModelCut) -> tuple[SavedTensor, ...]:
    """Return what attention saves: its norm, latents of MLA, queries, keys, values, output and softmax factors."""
    shape, tokens, own = cut.shape, cut.tokens, cut.own_tokens
    inputs = tokens * (cut.query_width + cut.key_width + cut.value_width)
    output = SavedTensor(tokens * cut.output_width, "cached", ("attn",), for_wgrad=True, offloaded_by="attn_proj")
    latents: tuple[SavedTensor, ...] = ()
    if shape.is_mla:
        elements = own * (shape.q_lora_rank + shape.kv_lora_rank)
        latents = (
            SavedTensor(elements + own * shape.qk_rope_head_dim, "bf16", ("attn",), offloaded_by="qkv_linear"),
            SavedTensor(elements, "gemm", ("attn", "mla_up_proj"), for_wgrad=True, offloaded_by="qkv_linear"),
        )
    return (
        *_norm(cut, ("attn_norm", "qkv_linear"), "attn"),
        *latents,
        SavedTensor(inputs, "bf16", ("attn", "mla_up_proj") if shape.is_mla else ("attn",), offloaded_by="core_attn"),
        output,
        SavedTensor(
            tokens * (shape.num_attention_heads // cut.tp), "fp32", ("attn", "core_attn"), offloaded_by="core_attn"
        ),
        output._replace(for_wgrad=False, a2a_only=True),
    )


def _first(cut: ModelCut) -> int:
    """Return how many matrices are before the activation."""
    return 2 if cut.shape.gated_mlp else 1


def _mlp_linears(cut: ModelCut, name: str, rows: int, width: int, copies: int = 1) -> tuple[Linear, Linear]:
    hidden, bias = cut.shape.hidden_size, cut.shape.mlp_bias
    return (
        Linear(f"{name}_fc1", rows, hidden, _first(cut) * width, bias, copies),
        Linear(f"{name}_fc2", rows, width, hidden, bias, copies),
    )


def _activated(
    cut: ModelCut, rows: int, width: int, modules: tuple[str, str], parts: tuple[str, ...]
) -> tuple[SavedTensor, ...]:
    """Return input and output of an MLP's activation.

    `modules` are the activation and what takes its output; `parts` the whole MLP's, then the activation's alone.
    """
    activation, after = modules
    return (
        SavedTensor(rows * _first(cut) * width, "cached", parts[:-1], offloaded_by=activation),
        SavedTensor(rows * width, "gemm", parts, for_wgrad=True, offloaded_by=after),
    )


def _mlp(cut: ModelCut) -> BlockPiece:
    """The MLP of a dense layer."""
    width, outer = cut.shape.intermediate_size // cut.tp, cut.own_tokens * cut.shape.hidden_size
    act = BF16 * (_first(cut) + 1) * cut.tokens * width
    vector = BF16 * 3 * outer + act
    return BlockPiece(
        "mlp",
        _mlp_linears(cut, "mlp", cut.tokens, width),
        0,
        (
            *_norm(cut, ("mlp_norm", "mlp_fc1"), "mlp"),
            *_activated(cut, cut.tokens, width, ("mlp_act", "mlp_fc2"), ("mlp", "mlp_act")),
        ),
        cut.tokens * _first(cut) * width + outer,
        vector_bytes=vector,
        backward_vector_bytes=2 * vector,
        collectives=_tp_collectives(cut),
        recomputed=(Recomputed(("mlp_act",), vector_bytes=act),),
    )


def _shared_experts(cut: ModelCut) -> BlockPiece:
    """The shared experts, whose residual and norms are the layer's."""
    width = cut.shape.shared_width // cut.tp
    linears = _mlp_linears(cut, "shared", cut.tokens, width)
    act = BF16 * (_first(cut) + 1) * cut.tokens * width
    return BlockPiece(
        "mlp",
        linears,
        0,
        _activated(cut, cut.tokens, width, ("shared_experts",) * 2, ("moe", "shared_experts", "mlp", "mlp_act")),
        cut.tokens * _first(cut) * width,
        vector_bytes=act,
        backward_vector_bytes=2 * act,
        collectives=_tp_collectives(cut),
        recomputed=(
            Recomputed(("shared_experts", "moe"), linears, act, whole=True),
            Recomputed(("mlp_act",), vector_bytes=act),
        ),
    )


def _experts(cut: ModelCut) -> BlockPiece:
    """The routed experts of a rank, with the sort of their tokens; what the router saves is counted here."""
    shape, rows = cut.shape, cut.routed_rows
    width, outer = shape.moe_intermediate_size // cut.etp, cut.own_tokens * shape.hidden_size
    linears = _mlp_linears(cut, "expert", rows, width, shape.num_experts // cut.ep)
    act = BF16 * (_first(cut) + 1) * rows * width
    vector = act + BF16 * 3 * outer
    permuted, size_bytes = BF16 * 4 * rows * shape.hidden_size, BF16 * rows * shape.hidden_size
    of_tp = (BlockMessage("all_gather", "etp", size_bytes), BlockMessage("reduce_scatter", "etp", size_bytes))
    return BlockPiece(
        "experts",
        linears,
        0,
        (
            *_norm(cut, ("mlp_norm", "router")),
            SavedTensor(cut.own_tokens * shape.num_experts, "router", ("moe",), offloaded_by="router"),
            SavedTensor(rows * shape.hidden_size, "gemm", ("moe",), for_wgrad=True, offloaded_by="expert_fc1"),
            SavedTensor(rows, "fp32", ("moe",), offloaded_by="expert_fc1"),
            *_activated(cut, rows, width, ("moe_act", "expert_fc2"), ("moe", "mlp", "moe_act")),
        ),
        rows * (_first(cut) * shape.moe_intermediate_size // cut.etp + shape.hidden_size) + outer,
        vector_bytes=vector,
        backward_vector_bytes=2 * vector,
        permuted_bytes=permuted,
        collectives=of_tp,  # Megatron-LM's dispatcher: gathered before the GEMMs, scattered after them
        recomputed=(
            Recomputed(("moe",), linears, act, False, True, permuted, (_exchange(cut, 2), *of_tp), True),
            Recomputed(("moe_act",), vector_bytes=act),
        ),
    )


def _embedding(cut: ModelCut) -> BlockPiece:
    shape, size_bytes = cut.shape, BF16 * cut.tokens * cut.shape.hidden_size
    tables = [Linear("embedding", 0, shape.hidden_size, cut.vocabulary, fused=False)]
    if shape.max_position_embeddings:
        tables.append(Linear("positions", 0, shape.hidden_size, shape.max_position_embeddings, fused=False))
    return BlockPiece(
        "embed",
        tuple(tables),
        vector_bytes=2 * size_bytes,
        backward_vector_bytes=4 * size_bytes,
        collectives=(
            BlockMessage("reduce_scatter", "tp", size_bytes, 1, 0),
            BlockMessage("all_gather", "tp", size_bytes, 0, 1),
        ),
    )


def _head(cut: ModelCut) -> BlockPiece:
    """Final norm, head and loss; the GEMM is BF16, logits are FP32 in the loss."""
    hidden, logits = cut.shape.hidden_size, cut.tokens * cut.vocabulary
    outer = cut.own_tokens * hidden
    size_bytes = BF16 * cut.tokens * hidden
    return BlockPiece(
        "head",
        (Linear("head", cut.tokens, hidden, cut.vocabulary, precision="bf16"),),
        _norm_parameters(cut),
        (SavedTensor(2 * outer, "bf16"), SavedTensor(logits, "logits")),
        vector_bytes=BF16 * 2 * outer + (BF16 + 3 * FP32) * logits,
        backward_vector_bytes=2 * BF16 * 2 * outer + (BF16 + FP32) * logits,
        collectives=(
            BlockMessage("all_gather", "tp", size_bytes),
            BlockMessage("reduce_scatter", "tp", size_bytes, 0, 1),
        ),
    )


def _mtp_projection(cut: ModelCut) -> BlockPiece:
    """Two norms, their joined outputs and the projection of both, in front of an MTP block's layer; its final norm."""
    hidden, outer = cut.shape.hidden_size, cut.own_tokens * cut.shape.hidden_size
    vector = BF16 * 4 * outer
    return BlockPiece(
        "embed",
        (Linear("mtp_projection", cut.tokens, 2 * hidden, hidden // cut.tp),),
        3 * _norm_parameters(cut),
        (SavedTensor(4 * outer, "bf16"),),
        vector_bytes=vector,
        backward_vector_bytes=2 * vector,
    )
