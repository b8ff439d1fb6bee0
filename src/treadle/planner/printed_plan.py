"""A plan as `treadle plan --json` prints it."""

from __future__ import annotations

from typing import Annotated, TypedDict

from treadle.fields.kinds import Count, CountFrom1, OneOf, Positive, Share
from treadle.folding.printed_stragglers import StragglersJson
from treadle.trainers.job_description import EFFECTS


class JobJson(TypedDict):
    """A job as it is printed."""

    schedule: Annotated[str, "The pipeline's schedule."]
    tp: Annotated[CountFrom1, "Ranks of tensor parallelism."]
    cp: Annotated[CountFrom1, "Ranks of context parallelism."]
    pp: Annotated[CountFrom1, "Ranks of the pipeline."]
    vpp: Annotated[CountFrom1, "Stages on each rank."]
    ep: Annotated[CountFrom1, "Ranks of an expert group."]
    dp: Annotated[CountFrom1, "Replicas of what is not an expert."]
    micro_batch_size: Annotated[CountFrom1, "Sequences of a micro-batch."]
    microbatches: Annotated[CountFrom1, "Micro-batches of a replica in a step."]
    global_batch_size: Annotated[CountFrom1, "Sequences of a step."]
    seq_len: Annotated[CountFrom1, "Tokens of a sequence."]
    precision: Annotated[str, "Precision of GEMMs: bf16, fp8, mxfp8 or nvfp4."]
    layout: Annotated[str, "The blocks of each stage as Megatron writes them; d is a dense layer."]
    recompute: Annotated[list[str], "Modules that are recomputed, as Megatron names them, or attn and mlp; full: all."]
    offload: Annotated[list[str], "Modules whose saved inputs are copied to the host and back."]
    sharding: Annotated[str, "What replicas divide: optimizer, gradients (ZeRO-2) or parameters (FSDP)."]
    gradient_bytes: Annotated[CountFrom1, "Bytes of a main gradient: 4 in FP32, 2 in BF16."]
    moment_bytes: Annotated[CountFrom1, "Bytes of each of Adam's moments: 4 in FP32, 2 in BF16."]
    saved: Annotated[str, "Precision of saved inputs of activations and of attention's output projection."]
    cuda_graph: Annotated[str, "none, partial or whole."]
    step_s: Annotated[Positive, "Seconds of a step."]
    memory_bytes: Annotated[Count, "Bytes of the rank that holds most."]


class MemoryJson(TypedDict):
    """The memory of a rank as it is printed."""

    parameters: Annotated[Count, "Parameters."]
    gradients: Annotated[Count, "Main gradients."]
    optimizer: Annotated[Count, "States of the optimizer, as sharded."]
    activations: Annotated[Count, "Saved for backwards, without logits."]
    logits: Annotated[Count, "Logits of the head."]
    temporary: Annotated[Count, "Needed by what is computed at the peak."]
    buffers: Annotated[Count, "Messages, workspaces, copies of weights."]


class UncertaintyJson(TypedDict):
    """How far the step of published runs like a job was off, as it is printed."""

    low_s: Annotated[Positive, "The step is from here ..."]
    high_s: Annotated[Positive, "... to here for 80 % of the runs."]
    typical: Annotated[float, "Median of the absolute errors, as a share."]
    pair: Annotated[float, "Median error of the ratio of two runs, as a share: nearer jobs cannot be ranked."]
    runs: Annotated[CountFrom1, "Published runs."]
    like: Annotated[str, "What they have in common with the job."]


class StepPartJson(TypedDict):
    """A part of the step as it is printed."""

    part: Annotated[str, "GEMM, attention, elementwise, permute, launches, TP, CP, EP, PP, DP, optimizer or idle."]
    seconds: Annotated[Positive, "What a rank, on average, spends on it."]


class ChosenJson(JobJson):
    """The chosen job as it is printed."""

    uncertainty: Annotated[UncertaintyJson, "The range of the step."]

    tokens_per_s_per_gpu: Annotated[Positive, "Tokens a second and GPU."]
    tflops_per_gpu: Annotated[Positive, "TFLOPS of the model a GPU, without what is recomputed."]
    run_tokens: Annotated[CountFrom1, "Tokens of the whole run: --tokens, or 10^12."]
    run_days: Annotated[Positive, "Days that the run takes."]
    run_gpu_hours: Annotated[Positive, "GPU-hours that the run takes."]
    mfu: Annotated[Share, "Model FLOPs utilisation."]
    bubble: Annotated[Share, "The share of the step in which a rank, on average, does not compute."]
    exposed_communication: Annotated[
        Share,
        "The share of the step in which a rank, on average, communicates and does not compute.",
    ]
    parts: Annotated[list[StepPartJson], "What the step consists of; seconds add up to it."]
    clean: Annotated[bool, "The verifier has no finding about the job's Program."]
    host_bytes: Annotated[
        Count,
        "The most that a GPU's offloaded activations take in the host's memory; 0 without offload.",
    ]
    untrainable: Annotated[str | None, "Why treadle.train cannot run the job; null if it can."]
    memory: Annotated[list[MemoryJson], "Bytes of each rank of the pipeline at its peak, by part."]


class AlternativeJson(TypedDict):
    """A job that differs in one knob as it is printed."""

    knob: Annotated[str, "The one knob that differs."]
    value: Annotated[str, "Its other value."]
    fits: Annotated[bool, "Does the job fit into memory."]
    slower: Annotated[
        float | None, "The share by which its step is longer, below 0 if shorter; null if it does not fit."
    ]
    memory_bytes: Annotated[Count, "Bytes of its rank that holds most."]
    reason: Annotated[str, "Where the difference comes from."]


class ChangeJson(TypedDict):
    """A change of a judged job as it is printed."""

    settings: Annotated[dict[str, str | None], "The trainer's settings, each with its new value; null: left out."]
    step: Annotated[float, "Share by which the step is longer; below 0 if it is shorter."]
    memory_bytes: Annotated[int, "Bytes that the rank that holds most holds more; below 0 if less."]


class UnreadJson(TypedDict):
    """A setting that the estimate does not follow, as it is printed."""

    setting: Annotated[str, "Its name in the trainer."]
    value: Annotated[str, "Its value."]
    matters: Annotated[str, OneOf(EFFECTS), "What it changes."]


class JudgedJson(TypedDict):
    """A judged configuration as it is printed."""

    trainer: Annotated[str, "The trainer whose configuration it is."]
    model: Annotated[str, "The model."]
    cluster: Annotated[str, "The cluster."]
    gpus: Annotated[CountFrom1, "Its GPUs."]
    memory_limit_bytes: Annotated[CountFrom1, "What a GPU may hold."]
    fits: Annotated[bool, "Does the job fit into memory."]
    job: Annotated[ChosenJson, "The job of the file."]
    error: Annotated[Share, "Median error of the ratio of two steps: nearer jobs cannot be ranked."]
    changes: Annotated[list[ChangeJson], "Changes that are better by more than the error, the best first."]
    pair: Annotated[ChangeJson | None, "The best two together; null if the best alone is as good within the error."]
    num_read: Annotated[Count, "Settings that touch the step or memory and are in the estimate."]
    unread: Annotated[list[UnreadJson], "Settings that are not."]
    notes: Annotated[list[str], "What was assumed."]


class UnableJson(TypedDict):
    """A schedule that can do no job as it is printed."""

    schedule: Annotated[str, "Its name."]
    reason: Annotated[str, "Why it can do none."]


class PlanJson(TypedDict):
    """A plan as it is printed."""

    model: Annotated[str, "The model."]
    cluster: Annotated[str, "The cluster."]
    gpus: Annotated[CountFrom1, "Its GPUs."]
    tokens_per_batch: Annotated[CountFrom1, "Tokens of a step, over all GPUs."]
    memory_limit_bytes: Annotated[CountFrom1, "What a GPU may hold."]
    candidates: Annotated[CountFrom1, "Jobs that were considered."]
    too_large: Annotated[Count, "Those among them that were estimated and do not fit into memory."]
    simulated: Annotated[CountFrom1, "Those that were simulated; the others cannot be faster or smaller."]
    chosen: Annotated[ChosenJson, "The advised job: of those within the error of the fastest, the simplest."]
    reason: Annotated[str, "Why the advised job is not the fastest; empty if it is."]
    fastest: Annotated[JobJson, "The fastest job that fits."]
    without_offload: Annotated[
        JobJson | None,
        "Where one of the two offloads: what would be advised without; null if nothing fits, or none of them does.",
    ]
    front: Annotated[list[JobJson], "Jobs of which none is beaten in both time and memory, the fastest first."]
    alternatives: Annotated[list[AlternativeJson], "The best job with another value of one knob, for each."]
    unable: Annotated[list[UnableJson], "Schedules that can do no job of the search."]
    stragglers: Annotated[
        StragglersJson | None,
        "Steps with slow GPUs, under the chosen schedule and the others that fit; null without --stragglers.",
    ]
