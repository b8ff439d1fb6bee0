"""Megatron-LM's side of a job: the flags that launch it, and the combinations that Megatron-LM refuses.

Sources are Megatron-LM main of 2026-08-22 (d98e8a64): `arguments.py` is megatron/training/arguments.py,
`transformer_config.py` megatron/core/transformer/transformer_config.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from treadle.estimate import Job
from treadle.ir.blocks import write_layout
from treadle.schedules import family

_MODULES = ("core_attn", "mla_up_proj", "layernorm", "moe_act", "moe", "shared_experts")
"""Recomputed modules that Megatron-LM has under the same names; `mlp` is one in dense models."""

_LOW_PRECISION = {
    "bf16": (),
    "fp8": ("--fp8-format hybrid",),
    "mxfp8": ("--fp8-format e4m3", "--fp8-recipe mxfp8"),
    "nvfp4": ("--fp4-format e2m1", "--fp4-recipe nvfp4"),
}
_PARTIAL = {True: "attn moe_router moe_preprocess", False: "attn mlp"}
"""--cuda-graph-modules of partial graphs, of models with and without experts."""


class MegatronCheck(NamedTuple):
    """An assertion of Megatron-LM."""

    holds: Callable[[Job], bool]
    """True of a job that fails it."""

    text: str
    source: str
    warned: bool = False
    """Megatron-LM warns and runs. A search leaves such a job out unless its schedule was named."""


def _overlapped(job: Job) -> bool:
    return family(job.schedule).overlapped


REFUSALS = (
    MegatronCheck(
        lambda job: _overlapped(job) and "full" in job.recompute,
        "overlap_moe_expert_parallel_comm takes no full recomputation",
        "transformer_config.py:3021",
    ),
    MegatronCheck(
        lambda job: _overlapped(job) and "moe" in job.recompute,
        "overlap_moe_expert_parallel_comm takes no moe in recompute_modules",
        "transformer_config.py:3030",
    ),
    MegatronCheck(
        lambda job: _overlapped(job) and job.ep == 1,
        "overlap_moe_expert_parallel_comm needs EP above 1",
        "transformer_config.py:3013",
    ),
    MegatronCheck(
        lambda job: _overlapped(job) and job.model.num_nextn_predict_layers > 1,
        "overlap_moe_expert_parallel_comm takes one MTP layer at most",
        "transformer_config.py:3042",
    ),
    MegatronCheck(
        lambda job: job.cuda_graph == "partial" and "full" in job.recompute,
        "full recomputation goes with CUDA graphs of the whole iteration only",
        "transformer_config.py:2857",
    ),
    MegatronCheck(
        lambda job: job.cuda_graph == "partial" and "moe" in job.recompute,
        "recomputation of moe takes no partial CUDA graphs, which include moe_router",
        "transformer_config.py:2865",
    ),
    MegatronCheck(
        lambda job: _overlapped(job) and job.tp * job.cp > 1 and "mxfp8" not in job.cluster.peak_flops,
        "before Blackwell, TP or CP wants CUDA_DEVICE_MAX_CONNECTIONS=1 and overlap_moe_expert_parallel_comm more; "
        "Megatron-LM advises against both (--schedule interleaved-overlap has it all the same)",
        "arguments.py:1466",
        warned=True,
    ),
)
"""`moe_token_dispatcher_type` (transformer_config.py:3016) and shared-expert overlap (3039) are flags alone: those that
`megatron_flags` gives pass."""


def refusal(job: Job, *, named: bool) -> str | None:
    """Return why Megatron-LM refuses a job that no other public trainer runs; None if it does not.

    `named`: the schedule was asked for by name, so that what Megatron-LM only warns about is no reason.
    """
    if not _runs(job) or (len(family(job.schedule).trainers) > 1 and job.cuda_graph == Job.cuda_graph):
        return None
    found = next((each for each in REFUSALS if each.holds(job) and not (named and each.warned)), None)
    return f"Megatron-LM: {found.text} ({found.source})" if found is not None else None


def megatron_flags(job: Job) -> tuple[str, ...]:
    """Return the options that launch a job with Megatron-LM; none where it has no counterpart of the job."""
    modules = {*_MODULES, "full"} | (set() if job.model.is_moe else {"mlp"})
    if not _runs(job) or job.sharding not in ("none", "optimizer") or not modules.issuperset(job.recompute):
        return ()
    return tuple(_flags(job))


def graph_flags(job: Job) -> tuple[str, ...]:
    """Return the options of Megatron-LM for a job's CUDA graphs."""
    if job.cuda_graph == "partial":
        return "--cuda-graph-impl transformer_engine", f"--cuda-graph-modules {_PARTIAL[job.model.is_moe]}"
    return ("--cuda-graph-impl full_iteration",) if job.cuda_graph == "whole" else ()


def _runs(job: Job) -> bool:
    return any(trainer.startswith("Megatron-LM") for trainer in family(job.schedule).trainers)


def _flags(job: Job) -> Iterator[str]:
    assert job.layout is not None
    yield f"--tensor-model-parallel-size {job.tp}"
    if job.tp > 1 and job.sequence_parallel:
        yield "--sequence-parallel"
    if job.cp > 1:
        yield f"--context-parallel-size {job.cp}"
    yield f"--pipeline-model-parallel-size {job.pp}"
    if job.pp > 1:
        yield f"--pipeline-model-parallel-layout '{write_layout(job.layout)}'"
    if job.model.is_moe:  # Megatron-LM's default of the experts' TP is TP
        yield f"--expert-model-parallel-size {job.ep} --expert-tensor-parallel-size {job.etp}"
        yield "--moe-grouped-gemm --moe-token-dispatcher-type alltoall"
    if job.model.num_nextn_predict_layers:
        yield f"--mtp-num-layers {job.model.num_nextn_predict_layers}"
    yield f"--micro-batch-size {job.micro_batch_size} --global-batch-size {job.global_batch_size}"
    yield f"--seq-length {job.seq_len} --bf16"
    yield from _LOW_PRECISION[job.precision]
    if job.sharding == "optimizer":
        yield "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    if job.gradient_bytes == 2:
        yield "--grad-reduce-in-bf16"
    if job.moment_bytes == 2:
        yield "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    if job.saved == "fp8":
        yield "--activation-func-fp8-input-store"
    if _overlapped(job):
        yield "--overlap-moe-expert-parallel-comm"
    if "full" in job.recompute:
        yield f"--recompute-granularity full --recompute-method block --recompute-num-layers {_most_layers(job)}"
    elif job.recompute:
        yield f"--recompute-granularity selective --recompute-modules {' '.join(job.recompute)}"
    yield from graph_flags(job)


def _most_layers(job: Job) -> int:
    """Return the layers that a stage recomputes at most."""
    assert job.layout is not None
    return job.recompute_layers or max(sum(row.count(letter) for letter in "td") for row in job.layout)
