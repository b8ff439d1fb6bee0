"""What a job's forwards save, in the words of costs: by part of a layer and by block, and what of it is offloaded."""

from __future__ import annotations

from dataclasses import replace

from treadle.estimate.activations import ActivationCut, block_activations, saved_by_part
from treadle.estimate.host_copies import offloaded_bytes
from treadle.estimate.job import Job


def saved_bytes(job: Job) -> dict[str, int]:
    """Return the [saved_bytes] of a job's costs: all that a part saves, and what it keeps where it is recomputed.

    What Megatron's finer recomputation (core_attn, mla_up_proj and so on) discards is not counted; attn and mlp are ops
    of a Program, which discards and saves them.
    """
    finer = tuple(part for part in job.recompute if part not in ("attn", "mlp", "full"))
    cut = replace(ActivationCut.of(job, "p2p", fused_loss=True), recompute=finer)
    found = {"embed": 0, "head": block_activations(cut, "L").saved}
    if job.model.num_nextn_predict_layers:
        found["mtp"] = block_activations(cut, "m").saved
    prefixes = {"t": ""} | ({"d": "dense_"} if job.model.is_moe and job.model.num_dense_layers else {})
    for block, prefix in prefixes.items():
        found |= _of_layer(cut, block, prefix=prefix)
        if job.offload:
            found[f"{prefix}offload"] = offloaded_bytes(job, block)
    return found


def _of_layer(cut: ActivationCut, block: str, *, prefix: str) -> dict[str, int]:
    found = {}
    for part in ("attn", "mlp"):
        tensors = saved_by_part(cut, block)[part]
        saved = [tensor for tensor in tensors if set(tensor.discarded_by).isdisjoint(cut.recompute)]
        found[f"{prefix}{part}"] = int(cut.size(saved))
        found[f"{prefix}{part}_input"] = int(cut.size(tensor for tensor in saved if part not in tensor.discarded_by))
    return found
