"""Checks of a job: names that mean something, whole numbers, and sizes that divide one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.estimate.cluster import PRECISIONS
from treadle.estimate.input_files import nearest_hint
from treadle.ir.blocks import check_blocks, with_dense

if TYPE_CHECKING:
    from treadle.estimate.job import Job
    from treadle.estimate.model_shape import ModelShape

CUDA_GRAPHS = ("none", "partial", "whole")
SHARDINGS = ("none", "optimizer", "gradients", "parameters")
RECOMPUTED = (
    "full",
    "attn",
    "mlp",
    "core_attn",
    "mla_up_proj",
    "layernorm",
    "mlp_act",
    "moe_act",
    "moe",
    "shared_experts",
)
_SIZES = ("tp", "cp", "pp", "vpp", "ep", "etp", "micro_batch_size", "global_batch_size", "seq_len")


def check_job(job: Job) -> None:
    """Raise a ValueError if a job makes no sense; it names what came, what is allowed and the way out."""
    _check_numbers(job)
    _check_names(job)
    _check_ranks(job)
    _check_cuts(job)


def layout_of_model(layout: tuple[str, ...], model: ModelShape) -> tuple[str, ...]:
    """Return a layout with the model's first layers as dense ones.

    Raises:
        ValueError: the layout is none, or has not the model's blocks.

    """
    check_blocks(layout)
    found = "".join(layout)
    if found.replace("d", "t") != model.blocks.replace("d", "t"):
        raise ValueError(
            f"a layout of {model.name} has {model.num_hidden_layers} layers and {model.num_nextn_predict_layers} MTP "
            f"blocks, got {found.count('t') + found.count('d')} and {found.count('m')}"
        )
    return with_dense(layout, model.num_dense_layers) if model.is_moe else layout


def _check_numbers(job: Job) -> None:
    for name in _SIZES:
        value = getattr(job, name)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is a whole number from 1, got {value!r}")
    if type(job.recompute_layers) is not int or job.recompute_layers < 0:
        raise ValueError(f"recompute_layers is a whole number from 0, got {job.recompute_layers!r}")


def _check_names(job: Job) -> None:
    known = {"precision": PRECISIONS, "cuda_graph": CUDA_GRAPHS, "sharding": SHARDINGS}
    for name, allowed in known.items():
        _check_name(name, getattr(job, name), allowed)
    if isinstance(job.recompute, str):
        raise ValueError(f"recompute is a tuple of parts, got the text {job.recompute!r}; write ({job.recompute!r},)")
    for part in job.recompute:
        _check_name("recompute", part, RECOMPUTED)
    if "full" in job.recompute and len(job.recompute) > 1:
        raise ValueError(f"recompute full is the whole layer, got {job.recompute}; give either full or parts")
    if job.recompute_layers and "full" not in job.recompute:
        raise ValueError("recompute_layers is for recompute full, which is not asked for; leave it 0")


def _check_name(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = nearest_hint(str(value), list(allowed))
        raise ValueError(f"{name} is one of {', '.join(allowed)}, got {value!r}{near}")


def _check_ranks(job: Job) -> None:
    cut = job.tp * job.cp * job.pp
    if job.cluster.num_gpus % cut:
        raise ValueError(f"tp x cp x pp is {cut} and does not divide {job.cluster.num_gpus} GPUs")
    unit = job.micro_batch_size * job.dp
    if job.global_batch_size % unit:
        nearest = max(1, round(job.global_batch_size / unit)) * unit
        raise ValueError(
            f"the global batch is a multiple of micro_batch_size x dp, {job.micro_batch_size} x {job.dp}, "
            f"got {job.global_batch_size}; the nearest is {nearest}"
        )
    if not job.model.is_moe and (job.ep, job.etp) != (1, 1):
        raise ValueError(f"{job.model.name} has no experts, got ep={job.ep} etp={job.etp}; leave both 1")
    if job.model.is_moe and (job.tp * job.cp * job.dp) % (job.ep * job.etp):
        raise ValueError(
            f"ep x etp ({job.ep} x {job.etp}) does not divide the {job.tp * job.cp * job.dp} ranks of a stage"
        )


def _check_cuts(job: Job) -> None:
    model = job.model
    cuts = [
        ("tp", job.tp, "num_attention_heads", model.num_attention_heads),
        ("tp", job.tp, "intermediate_size", model.intermediate_size),
    ]
    if not model.is_mla and job.tp <= model.num_key_value_heads:  # where tp is larger, ranks share a head
        cuts.append(("tp", job.tp, "num_key_value_heads", model.num_key_value_heads))
    if model.is_moe:
        cuts.append(("ep", job.ep, "num_experts", model.num_experts))
        cuts.append(("etp", job.etp, "moe_intermediate_size", model.moe_intermediate_size))
        if model.shared_width:
            cuts.append(("tp", job.tp, "the width of shared experts", model.shared_width))
    if job.cp > 1:
        cuts.append(("2 x cp", 2 * job.cp, "seq_len", job.seq_len))
    if job.sequence_parallel:
        cuts.append(("cp x tp", job.cp * job.tp, "seq_len x micro_batch_size", job.seq_len * job.micro_batch_size))
    for name, parts, of, size in cuts:
        if size % parts:
            nearest = max(part for part in range(1, parts + 1) if size % part == 0)
            raise ValueError(f"{name} divides {of} ({size}), got {parts}; the next smaller that does is {nearest}")
