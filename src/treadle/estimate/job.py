"""A job: a model on a cluster, cut by every kind of parallelism, with all that decides its time and memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from treadle.estimate.cluster import PRECISIONS, Cluster
from treadle.estimate.model_shape import ModelShape
from treadle.fields.kinds import COUNT, FROM_1, OneOf
from treadle.ir import Placement
from treadle.ir.blocks import check_blocks, with_dense
from treadle.schedules import default_schedule, family

CUDA_GRAPHS = ("none", "partial", "whole")
DISPATCHES = ("bf16", "fp8")
GRADIENT_BYTES = {"fp32": 4, "bf16": 2}
MOMENT_BYTES = {"fp32": 4, "bf16": 2}
SAVED = ("bf16", "fp8")
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
OFFLOADED = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "mlp_fc1",
    "mlp_act",
    "mlp_fc2",
    "router",
    "expert_fc1",
    "moe_act",
    "expert_fc2",
    "shared_experts",
)
"""Modules whose saved inputs can be offloaded. Those of norms, attention, expert_fc1 and moe_act are Megatron's."""
_NAMES = {
    "precision": OneOf(PRECISIONS),
    "cuda_graph": OneOf(CUDA_GRAPHS),
    "sharding": OneOf(SHARDINGS),
    "dispatch": OneOf(DISPATCHES),
    "saved": OneOf(SAVED),
}
_MODULES = {"recompute": OneOf(RECOMPUTED), "offload": OneOf(OFFLOADED)}
_SIZES = ("tp", "cp", "pp", "vpp", "ep", "etp", "micro_batch_size", "global_batch_size", "seq_len")


@dataclass(frozen=True)
class Job:
    """One way to train a model on a cluster.

    Names and meanings are Megatron's. Ranks are tp x cp x pp x dp; experts are spread over ep x etp ranks inside
    tp x cp x dp.

    Raises:
        ValueError: a name is not known, or sizes do not divide; the message names the nearest that is allowed.

    """

    model: ModelShape
    cluster: Cluster
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    micro_batch_size: int = 1
    global_batch_size: int = 1
    seq_len: int = 4096
    precision: str = "bf16"
    """Of GEMMs: bf16, fp8, mxfp8, nvfp4. Attention, the head and all messages stay bf16."""

    schedule: str = default_schedule()
    layout: tuple[str, ...] | None = None
    """Blocks of each stage. None: layers as even as can be, embedding first and head last. The first layers become
    the model's dense ones, which Megatron's layouts do not tell apart."""

    recompute: tuple[str, ...] = ()
    """Parts recomputed before their backward: attn and mlp (whole segments), core_attn, mla_up_proj, layernorm,
    mlp_act, moe_act, moe, shared_experts; "full" is the whole layer."""

    recompute_layers: int = 0
    """With "full": layers of each stage that are recomputed. 0: all."""

    offload: tuple[str, ...] = ()
    """Modules whose saved inputs are copied to the host and back: those of `OFFLOADED`. A model without experts has no
    router and no experts, and so on: names that it lacks copy nothing."""

    sequence_parallel: bool = True
    """With tp > 1, what tp does not cut is cut along the sequence."""

    cuda_graph: str = "none"
    """none, partial (parts of layers), or whole (the iteration)."""

    sharding: str = "optimizer"
    """What is cut over dp: none, optimizer (ZeRO-1, Megatron's distributed optimizer), gradients, parameters."""

    dispatch: str = "bf16"
    """Precision of tokens on their way to experts, and of the gradients of what experts return: bf16 or fp8."""

    gradient_bytes: int = 4
    """Of a main gradient, which wgrads add to and replicas reduce: 4 in FP32, 2 in BF16 (Megatron's
    grad_reduce_in_fp32 off)."""

    moment_bytes: int = 4
    """Of each of Adam's two moments: 4 in FP32, 2 in BF16 (Megatron's exp_avg_dtype and exp_avg_sq_dtype)."""

    saved: str = "bf16"
    """Precision of saved inputs of activations and of attention's output projection: bf16, or fp8 as DeepSeek-V3's
    report saves them (arXiv 2412.19437, section 3.3.3; Megatron's activation_func_fp8_input_store)."""

    def __post_init__(self) -> None:
        if self.layout is not None:
            object.__setattr__(self, "layout", _layout_of_model(self.layout, self.model))
        _check_job(self)

    @property
    def dp(self) -> int:
        """Replicas of what is not an expert."""
        return self.cluster.num_gpus // (self.tp * self.cp * self.pp)

    @property
    def expert_dp(self) -> int:
        """Replicas of an expert."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches that a pipeline takes in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @property
    def placement(self) -> Placement:
        """Which rank of the pipeline holds which stage."""
        return _placement(self.schedule, self.pp, self.vpp)

    @property
    def num_stages(self) -> int:
        """Stages along the pipe: pp x vpp, or pp where each is held twice (DualPipe)."""
        return self.placement.num_stages

    @property
    def num_holders(self) -> int:
        """Ranks that hold the same parameters, reduce their gradients together and divide their optimizer state."""
        return self.cp * self.dp * self.placement.num_pipes

    @property
    def num_expert_holders(self) -> int:
        """The same of an expert's parameters."""
        return self.expert_dp * self.placement.num_pipes

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank, before tp cuts the sequence."""
        return self.micro_batch_size * self.seq_len // self.cp


@lru_cache(maxsize=1024)
def _placement(schedule: str, pp: int, vpp: int) -> Placement:
    return family(schedule).placement(pp, vpp)


def _check_job(job: Job) -> None:
    """Raise a ValueError if a job makes no sense; it names what came, what is allowed and the way out."""
    _check_numbers(job)
    _check_names(job)
    _check_ranks(job)
    _check_cuts(job)


def _layout_of_model(layout: tuple[str, ...], model: ModelShape) -> tuple[str, ...]:
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
        FROM_1.check(getattr(job, name), name)
    COUNT.check(job.recompute_layers, "recompute_layers")
    for name in ("gradient_bytes", "moment_bytes"):
        if getattr(job, name) not in (2, 4):
            raise ValueError(f"{name} is 4 (FP32) or 2 (BF16), got {getattr(job, name)!r}")


def _check_names(job: Job) -> None:
    for name, allowed in _NAMES.items():
        allowed.check(getattr(job, name), name)
    for name, modules in _MODULES.items():
        given = getattr(job, name)
        if not isinstance(given, tuple):
            wayout = f"write ({given!r},)" if isinstance(given, str) else f"write {name}=() for none of them"
            raise ValueError(f"{name} is a tuple of modules, got {given!r}; {wayout}")
        for module in given:
            modules.check(module, name)
    if "full" in job.recompute and len(job.recompute) > 1:
        raise ValueError(f"recompute full is the whole layer, got {job.recompute}; give either full or parts")
    if job.recompute_layers and "full" not in job.recompute:
        raise ValueError("recompute_layers is for recompute full, which is not asked for; leave it 0")


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
