"""The work of each part of a block, read from its pieces: GEMMs of all phases, casts, messages, launches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache, reduce
from operator import add

from treadle.estimate.block_parts import BlockMessage, BlockPiece, Linear, block_parts
from treadle.estimate.group_messages import messages_of
from treadle.estimate.job import Job
from treadle.estimate.model_cut import ModelCut
from treadle.estimate.work import BF16, Gemm, GroupMessage, OpWork, PartWork

_FP8_SENT = (1 + 4 / 128) / 2
"""Bytes of a token in FP8, with an FP32 scale for each 128 of it, over those in BF16."""

BACKWARD_OF_ATTENTION = 2.5
"""GEMMs of attention's backward over its forward's: scores again, and four gradients, to two GEMMs."""

_LAUNCHES = {
    "attn": (20, 30, 4),
    "dispatch": (8, 8, 0),
    "mlp": (8, 12, 2),
    "experts": (20, 28, 4),
    "combine": (8, 8, 0),
    "embed": (4, 4, 0),
    "head": (10, 12, 1),
}
"""Launches of a piece: forward, dgrad, wgrad; in proportion, not one for each kernel (`launch_us`)."""

_EAGER = {
    "none": {},
    "partial": {"attn": 0.2, "dispatch": 0.6, "mlp": 0.2},
    "whole": dict.fromkeys(_LAUNCHES, 0.0),
}
"""The share of a piece's kernels that is launched one by one, by level of CUDA graphs; 1 where it is not named."""


_EXPERT_LAUNCHES = (1.0, 1.5, 0.5)
"""What the host does for each local expert in forward, dgrad and wgrad, in forwards; in FP8 and NVFP4, which quantise
the operands of each, and outside of whole graphs."""


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
    parts = block_parts(ModelCut.of(job, padded=False), block)
    return {name: reduce(add, (_work(job, piece) for piece in pieces)) for name, pieces in parts.items()}


def actions(job: Job, block: str) -> dict[str, OpWork]:
    """Return the work of each action of a block by the name that costs have for it.

    dgrad includes the smaller pieces that are recomputed (core_attn, mlp_act, ...). attn_r and mlp_r are the whole
    parts; they are here for layers and run only where the job's `recompute` names them.
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


def _attention_flops(job: Job, piece: BlockPiece) -> float:
    """Return the FLOPs of the forward of attention's core, causal, the mean of a model's full and windowed layers."""
    model, seq = job.model, job.seq_len
    window = min(model.sliding_window, seq) if model.sliding_window else seq
    pairs = seq * (seq + 1) / 2
    windowed = window * seq - window * (window - 1) / 2
    share = model.num_windowed_layers / model.num_hidden_layers
    mean = (1 - share) * pairs + share * windowed
    return 2.0 * piece.pair_width / job.tp * job.micro_batch_size * mean / job.cp


def _work(job: Job, piece: BlockPiece) -> PartWork:
    """Return the work of a piece."""
    linears = tuple(linear for linear in piece.linears if linear.rows)
    share = _EAGER[job.cuda_graph].get(piece.kind, 1.0)
    launches = [share * each for each in _LAUNCHES[piece.kind]]
    each_expert = piece.kind == "experts" and job.precision != "bf16" and job.cuda_graph != "whole"
    local = job.model.num_experts // job.ep if each_expert else 0
    experts = [local * each for each in _EXPERT_LAUNCHES]
    flops = _attention_flops(job, piece)
    forward = OpWork(
        attention_flops=flops,
        vector_bytes=piece.vector_bytes,
        cast_bytes=_cast_inputs(job, linears),
        permuted_bytes=piece.permuted_bytes,
        messages=_messages(job, ((_sent(job, piece, each, "dispatch"), each.forward) for each in piece.collectives)),
        launches=launches[0],
        expert_launches=experts[0],
    )
    backward = OpWork(
        attention_flops=BACKWARD_OF_ATTENTION * flops,
        vector_bytes=piece.backward_vector_bytes,
        cast_bytes=_cast_gradients(job, linears),
        permuted_bytes=piece.permuted_bytes,
        messages=_messages(job, ((_sent(job, piece, each, "combine"), each.backward) for each in piece.collectives)),
        launches=launches[1],
        expert_launches=experts[1],
    )
    return PartWork(
        _gemms(piece, (_forward(each) for each in linears)) + forward,
        _gemms(piece, (_dgrad(each) for each in linears)) + backward,
        _gemms(piece, (_wgrad(each, job.gradient_bytes) for each in linears))
        + OpWork(launches=launches[2], expert_launches=experts[2]),
        _again(job, piece, flops),
    )


def _again(job: Job, piece: BlockPiece, flops: float) -> OpWork:
    """Return what recomputation of less than the part adds to dgrad."""
    again = OpWork()
    for each in piece.recomputed:
        if set(each.names).isdisjoint(job.recompute):
            continue
        again += _gemms(piece, (_forward(linear) for linear in each.linears))
        again += OpWork(
            attention_flops=flops if each.attention else 0.0,
            vector_bytes=each.vector_bytes,
            cast_bytes=_cast_inputs(job, each.linears) if each.casts else 0.0,
            permuted_bytes=each.permuted_bytes,
            messages=_messages(job, ((collective, collective.forward) for collective in each.collectives)),
        )
        if each.whole:
            break
    return again


def _gemms(piece: BlockPiece, gemms: Iterable[Gemm]) -> OpWork:
    """Return GEMMs as work; those of experts are grouped."""
    return OpWork(grouped=tuple(gemms)) if piece.kind == "experts" else OpWork(tuple(gemms))


def _forward(linear: Linear) -> Gemm:
    return Gemm(_rows(linear), linear.outputs, linear.inputs, linear.copies, linear.precision)


def _dgrad(linear: Linear) -> Gemm:
    return Gemm(_rows(linear), linear.inputs, linear.outputs, linear.copies, linear.precision)


def _wgrad(linear: Linear, gradient_bytes: int) -> Gemm:
    """GEMM of inputs and gradients, added to main gradients: read and written."""
    return Gemm(linear.inputs, linear.outputs, _rows(linear), linear.copies, linear.precision, 2 * gradient_bytes)


def _rows(linear: Linear) -> float:
    """Rows of each copy."""
    return linear.rows / linear.copies


def _cast_inputs(job: Job, linears: Iterable[Linear]) -> float:
    """Bytes of casting the inputs of GEMMs to the job's precision."""
    return _cast_bytes(job) * sum(_rows(each) * each.inputs * each.copies for each in linears if not each.precision)


def _cast_gradients(job: Job, linears: Iterable[Linear]) -> float:
    """Bytes of casting the gradients of their outputs, for dgrad and wgrad."""
    return _cast_bytes(job) * sum(_rows(each) * each.outputs * each.copies for each in linears if not each.precision)


def _cast_bytes(job: Job) -> float:
    """Of an element: read as BF16, written along rows and along columns."""
    return {"bf16": 0.0, "nvfp4": BF16 + 2 * 0.5}.get(job.precision, BF16 + 2 * 1.0)


def _sent(job: Job, piece: BlockPiece, collective: BlockMessage, kind: str) -> BlockMessage:
    """Return an exchange as it is sent: in FP8, with scales, where it goes to experts and the job dispatches so."""
    if job.dispatch == "bf16" or piece.kind != kind:
        return collective
    return collective._replace(size_bytes=round(collective.size_bytes * _FP8_SENT))


def _messages(job: Job, collectives: Iterable[tuple[BlockMessage, int]]) -> tuple[GroupMessage, ...]:
    """Return the messages of collectives, each so many times."""
    return tuple(message for each, times in collectives for message in times * messages_of(job, each))
