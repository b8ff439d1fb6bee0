"""Times of data parallelism: gradients reduced, parameters gathered, and what of both layers hide where they are cut.

Where gradients or parameters are cut over replicas (ZeRO-2, FSDP), every micro-batch reduces the gradients of a layer,
and with parameters gathers the layer in its forward and in its backward, each beside the computation of the layer
before it. What takes longer than that computation is exposed, and at least the share of it that shows at the end of a
step too (`dp_hidden`): messages take SMs and bandwidth from what they run beside. Embedding and head come beside the
layers next to them.
"""

from __future__ import annotations

from collections.abc import Mapping

from treadle.estimate.group_messages import gather
from treadle.estimate.job import Job
from treadle.estimate.model_cut import ModelCut
from treadle.estimate.parameter_counts import block_parameters
from treadle.estimate.rates import constant
from treadle.ir.ops import LAYER_PARTS

PARAM_BYTES = 2


def data_parallel_seconds(job: Job, dense: float, experts: float, size_bytes: int) -> float:
    """Return the seconds to reduce-scatter or all-gather so many parameters over their replicas."""
    messages = gather(job, "dp", dense * size_bytes) + gather(job, "expert_dp", experts * size_bytes)
    return sum(message.seconds(job.cluster) for message in messages) / constant(job.cluster, "dp")


def layer_seconds(job: Job, block: str, size_bytes: int) -> float:
    """Return the seconds to reduce-scatter or all-gather the weights of one layer, t or d."""
    weights = block_parameters(ModelCut.of(job, padded=False), block).weights
    return data_parallel_seconds(job, *weights, size_bytes)


def with_exposed(job: Job, block: str, layer: Mapping[str, int], ticks_a_second: float) -> dict[str, int]:
    """Return the times of a layer's parts with what its gathers and reductions take longer than it computes."""
    if job.sharding not in ("gradients", "parameters") or not layer:
        return dict(layer)
    gathered = layer_seconds(job, block, PARAM_BYTES) if job.sharding == "parameters" else 0.0
    reduced = layer_seconds(job, block, job.gradient_bytes)
    shown = 1 - constant(job.cluster, "dp_hidden")
    exposed = {}
    for part, message, phases in (("mlp_f", gathered, "f"), ("mlp_b", gathered + reduced, "bw")):
        exposed[part] = max(shown * message * ticks_a_second, message * ticks_a_second - _sum(layer, phases))
    return {**layer, **{name: layer[name] + round(more) for name, more in exposed.items()}}


def _sum(layer: Mapping[str, int], phases: str) -> int:
    return sum(layer.get(f"{part}_{phase}", 0) for part in LAYER_PARTS for phase in phases)
