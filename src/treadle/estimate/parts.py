"""The parts of each kind of block, as work: attention, dense MLP, experts, their exchanges, embedding, head, MTP.

Experts are taken to be balanced.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from treadle.estimate.job import Job
from treadle.estimate.messages import cut_by_sequence, exchange, gather
from treadle.estimate.products import Projection, cast_inputs, forward_products, launched, make_part, together
from treadle.estimate.work import BF16, FP32, GroupMessage, OpWork, PartWork

BACKWARD_OF_ATTENTION = 2.5
"""Products of attention's backward over its forward's: scores again, and four gradients, to two products."""


@lru_cache(maxsize=1024)
def block_work(job: Job, block: str) -> Mapping[str, PartWork]:
    """Return the work of each part of a block: t (a layer, with experts if the model has them), d, E, m or L.

    Raises:
        ValueError: the letter names no block.

    Example:
        >>> from treadle.estimate import Job, load_cluster, load_model
        >>> job = Job(load_model("llama3-70b"), load_cluster("h100:64"), tp=4, pp=4, global_batch_size=64, seq_len=8192)
        >>> parts = block_work(job, "t")
        >>> round(sum(part.f.flops for part in parts.values()) / 1e12, 2)
        3.78

    """
    if block == "E":
        return {"embed": _embedding(job)}
    if block == "L":
        return {"head": _head(job)}
    if block == "m":
        return {"mtp": _mtp(job)}
    if block == "d" or (block == "t" and not job.model.is_moe):
        return {"attn": _attention(job), "mlp": _mlp(job, job.model.intermediate_size)}
    if block == "t":
        return {
            "attn": _attention(job, router=True),
            "dispatch": _exchange(job, "dispatch"),
            "mlp": _experts(job),
            "combine": _exchange(job, "combine"),
        }
    raise ValueError(f"blocks are E, t, d, m and L, got {block!r}")


def actions(job: Job, block: str) -> dict[str, OpWork]:
    """Return the work of each action of a block by the name that costs have for it.

    Input halves include the smaller pieces that are computed again (core_attn, mlp_act, ...). attn_r and mlp_r are the
    whole parts; they are here for layers and are done only where the job's `recompute` says so.
    """
    named: dict[str, OpWork] = {}
    for name, part in block_work(job, block).items():
        named[f"{name}_f"] = part.f
        named[f"{name}_b"] = part.b + part.again
        if part.w != OpWork():
            named[f"{name}_w"] = part.w
        if block in "td" and name in ("attn", "mlp"):
            named[f"{name}_r"] = part.f
    return named


def _attention(job: Job, *, router: bool = False) -> PartWork:
    """Attention and both norms of a layer, its own and the one behind it; with `router` that of experts."""
    model, tokens = job.model, job.tokens
    linears = _projections(job)
    outer = tokens * model.hidden_size / cut_by_sequence(job)
    heads = model.num_attention_heads // job.tp or 1
    inner = sum(linear.tokens * linear.outputs for linear in linears[:-1])
    norms = BF16 * 2 * 2 * outer  # each reads and writes
    vector = norms + BF16 * (3 * outer + 2 * inner)
    if router:
        linears = (
            *linears,
            Projection(tokens / cut_by_sequence(job), model.hidden_size, model.num_experts, 1, "bf16"),
        )
        vector += FP32 * 4 * model.num_experts * tokens / cut_by_sequence(job)
    flops = attention_flops(job)
    again = OpWork(attention_flops=flops if "core_attn" in job.recompute else 0.0)
    if "layernorm" in job.recompute:
        again += OpWork(vector_bytes=norms)
    if "mla_up_proj" in job.recompute and model.is_mla:
        ups = [linear for linear in linears if linear.inputs in (model.q_lora_rank, model.kv_lora_rank)]
        again += OpWork(gemms=forward_products(ups), vector_bytes=BF16 * 2 * heads * tokens * model.qk_nope_head_dim)
    forward, backward = _sequence_gathers(job), _sequence_gathers(job, backward=True)
    keys = gather(job, "cp", BF16 * job.cp * tokens * _key_width(job), "ring")
    return make_part(
        job,
        "attn",
        linears,
        OpWork(attention_flops=flops, vector_bytes=vector, messages=forward + keys),
        OpWork(attention_flops=BACKWARD_OF_ATTENTION * flops, vector_bytes=2 * vector, messages=backward + 2 * keys),
        again,
    )


def attention_flops(job: Job) -> float:
    """Return the FLOPs of the forward of attention's core, causal, the mean of a model's full and windowed layers."""
    model, seq = job.model, job.seq_len
    window = min(model.sliding_window, seq) if model.sliding_window else seq
    pairs = seq * (seq + 1) / 2
    windowed = window * seq - window * (window - 1) / 2
    share = model.num_windowed_layers / model.num_hidden_layers
    width = model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim if model.is_mla else 2 * model.head_dim
    mean = (1 - share) * pairs + share * windowed
    return 2.0 * width * model.num_attention_heads / job.tp * job.micro_batch_size * mean / job.cp


def _projections(job: Job) -> tuple[Projection, ...]:
    """The linear layers of attention, the one behind it last."""
    model, tokens, hidden = job.model, job.tokens, job.model.hidden_size
    heads = max(1, model.num_attention_heads // job.tp)
    if not model.is_mla:
        keys = max(1, model.num_key_value_heads // job.tp)
        width = model.head_dim
        return Projection(tokens, hidden, (heads + 2 * keys) * width), Projection(tokens, heads * width, hidden)
    query = heads * (model.qk_nope_head_dim + model.qk_rope_head_dim)
    cut = tokens / cut_by_sequence(job)
    queries = (
        (Projection(cut, hidden, model.q_lora_rank), Projection(tokens, model.q_lora_rank, query))
        if model.q_lora_rank
        else (Projection(tokens, hidden, query),)
    )
    return (
        *queries,
        Projection(cut, hidden, model.kv_lora_rank + model.qk_rope_head_dim),
        Projection(tokens, model.kv_lora_rank, heads * (model.qk_nope_head_dim + model.v_head_dim)),
        Projection(tokens, heads * model.v_head_dim, hidden),
    )


def _key_width(job: Job) -> float:
    """Elements of a token's keys and values on one rank."""
    model = job.model
    if model.is_mla:
        return model.num_attention_heads / job.tp * (model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim)
    return 2 * max(1, model.num_key_value_heads / job.tp) * model.head_dim


def _mlp(job: Job, width: int, *, shared: bool = False) -> PartWork:
    """A dense MLP; with `shared` the shared experts, whose residual and norms are the layer's."""
    model, tokens = job.model, job.tokens
    cut = width // job.tp
    both = 2 if model.gated_mlp else 1
    linears = (Projection(tokens, model.hidden_size, both * cut), Projection(tokens, cut, model.hidden_size))
    residual = 0.0 if shared else 3 * tokens * model.hidden_size / cut_by_sequence(job)
    act = BF16 * (both + 1) * tokens * cut
    vector = BF16 * residual + act
    again = OpWork()
    if shared and not {"shared_experts", "moe"}.isdisjoint(job.recompute):
        again = OpWork(gemms=forward_products(linears), vector_bytes=act)
    elif "mlp_act" in job.recompute:
        again = OpWork(vector_bytes=act)
    return make_part(
        job,
        "mlp",
        linears,
        OpWork(vector_bytes=vector, messages=_sequence_gathers(job)),
        OpWork(vector_bytes=2 * vector, messages=_sequence_gathers(job, backward=True)),
        again,
    )


def routed_tokens(job: Job) -> float:
    """Return the rows that a rank's experts take, if routing is balanced: tokens that are sent to two count twice."""
    return job.tokens / cut_by_sequence(job) * job.model.num_experts_per_tok * job.etp


def _experts(job: Job) -> PartWork:
    model = job.model
    local = max(1, model.num_experts // job.ep)
    width = model.moe_intermediate_size // job.etp
    rows = routed_tokens(job)
    both = 2 if model.gated_mlp else 1
    linears = (
        Projection(rows / local, model.hidden_size, both * width, local),
        Projection(rows / local, width, model.hidden_size, local),
    )
    act = BF16 * (both + 1) * rows * width
    outer = 3 * BF16 * job.tokens * model.hidden_size / cut_by_sequence(job)
    vector = act + outer
    permuted = BF16 * 4 * rows * model.hidden_size
    again = OpWork(vector_bytes=act if "moe_act" in job.recompute else 0.0)
    if "moe" in job.recompute:
        messages = 2 * exchange(job, job.tokens / cut_by_sequence(job), BF16 * model.hidden_size)
        again = OpWork(
            grouped=forward_products(linears),
            vector_bytes=act,
            cast_bytes=cast_inputs(job, linears),
            permuted_bytes=permuted,
            messages=messages,
        )
    spread = gather(job, "etp", BF16 * rows * model.hidden_size) if job.etp > 1 else ()
    part = make_part(
        job,
        "experts",
        linears,
        OpWork(vector_bytes=vector, permuted_bytes=permuted, messages=spread),
        OpWork(vector_bytes=2 * vector, permuted_bytes=permuted, messages=spread),
        again,
    )
    if not model.shared_width:
        return part
    return together(part, _mlp(job, model.shared_width, shared=True))


def _exchange(job: Job, name: str) -> PartWork:
    """Dispatch or combine: the same message in both directions, and both ways of the step."""
    size = BF16 * job.model.hidden_size
    messages = exchange(job, job.tokens / cut_by_sequence(job), size)
    forward, backward, _ = launched(job, name)
    return PartWork(OpWork(messages=messages, launches=forward), OpWork(messages=messages, launches=backward), OpWork())


def _embedding(job: Job) -> PartWork:
    model = job.model
    size = BF16 * job.tokens * model.hidden_size
    positions = model.max_position_embeddings * model.hidden_size
    forward, backward, _ = launched(job, "embed")
    scatter = gather(job, "tp", size, "reduce_scatter")
    return PartWork(
        OpWork(vector_bytes=2 * size, messages=scatter, launches=forward),
        OpWork(vector_bytes=4 * size, messages=gather(job, "tp", size), launches=backward),
        OpWork(),
        model.vocab_size // job.tp * model.hidden_size + positions,
    )


def _head(job: Job) -> PartWork:
    """Final norm, head and loss; the product is BF16, logits are FP32 in the loss."""
    model, tokens = job.model, job.tokens
    vocabulary = model.vocab_size // job.tp
    linears = (Projection(tokens, model.hidden_size, vocabulary, 1, "bf16"),)
    logits = tokens * vocabulary
    outer = BF16 * 2 * tokens * model.hidden_size / cut_by_sequence(job)
    gathered = gather(job, "tp", BF16 * tokens * model.hidden_size)
    scattered = gather(job, "tp", BF16 * tokens * model.hidden_size, "reduce_scatter")
    part = make_part(
        job,
        "head",
        linears,
        OpWork(vector_bytes=outer + (BF16 + 3 * FP32) * logits, messages=gathered),
        OpWork(vector_bytes=2 * outer + (BF16 + FP32) * logits, messages=gathered + scattered),
        OpWork(),
    )
    weights = 0 if model.tie_word_embeddings and job.pp == 1 else part.parameters
    return PartWork(part.f, part.b, part.w, weights)


def _mtp(job: Job) -> PartWork:
    """An MTP block: two norms and a projection of both, a layer, and the head with its loss once more."""
    model, tokens = job.model, job.tokens
    outer = BF16 * 4 * tokens * model.hidden_size / cut_by_sequence(job)
    joined = make_part(
        job,
        "embed",
        (Projection(tokens, 2 * model.hidden_size, model.hidden_size // job.tp),),
        OpWork(vector_bytes=outer),
        OpWork(vector_bytes=2 * outer),
        OpWork(),
    )
    head = _head(job)
    whole = together(joined, PartWork(head.f, head.b, head.w))
    for part in block_work(job, "t").values():
        whole = together(whole, part)
    return whole


def _sequence_gathers(job: Job, *, backward: bool = False) -> tuple[GroupMessage, ...]:
    """The collectives of tp around two linear layers: inputs gathered, outputs scattered; backward once more.

    With sequence parallelism inputs are gathered again for the weight half. Without it, an all-reduce moves as much.
    """
    size = BF16 * job.tokens * job.model.hidden_size
    gathers = (2 if job.sequence_parallel else 1) if backward else 1
    return gathers * gather(job, "tp", size) + gather(job, "tp", size, "reduce_scatter")
