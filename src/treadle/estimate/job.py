"""A job: a model on a cluster, cut by every kind of parallelism, with all that decides its time and memory."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.estimate.cluster import Cluster
from treadle.estimate.job_checks import check_job, layout_of_model
from treadle.estimate.model_shape import ModelShape
from treadle.estimate.placements import placement_of
from treadle.ir import Placement
from treadle.schedules import default_schedule


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
    """Of matrix products: bf16, fp8, mxfp8, nvfp4. Attention, the head and all messages stay bf16."""

    schedule: str = default_schedule()
    layout: tuple[str, ...] | None = None
    """Blocks of each stage. None: layers as even as can be, embedding first and head last. The first layers become
    the model's dense ones, which Megatron's layouts do not tell apart."""

    recompute: tuple[str, ...] = ()
    """Parts computed again before their backward: attn and mlp (whole segments), core_attn, mla_up_proj, layernorm,
    mlp_act, moe_act, moe, shared_experts; "full" is the whole layer."""

    recompute_layers: int = 0
    """With "full": layers of each stage that are computed again. 0: all."""

    offload: bool = False
    """Saved activations are copied to the host and back."""

    sequence_parallel: bool = True
    """With tp > 1, what tp does not cut is cut along the sequence."""

    cuda_graph: str = "none"
    """none, partial (parts of layers), or whole (the iteration)."""

    sharding: str = "optimizer"
    """What is cut over dp: none, optimizer (ZeRO-1, Megatron's distributed optimizer), gradients, parameters."""

    def __post_init__(self) -> None:
        if self.layout is not None:
            object.__setattr__(self, "layout", layout_of_model(self.layout, self.model))
        check_job(self)

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
        return placement_of(self.schedule, self.pp, self.vpp)

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
