"""What commands print with --json where they put it together themselves, as types: the schemas are made from them."""

from __future__ import annotations

from typing import Annotated, TypedDict

from treadle.costs.printed_problems import ProblemJson
from treadle.fields.kinds import Amount, Count, CountFrom1, OneOf, Share, Text
from treadle.ir.printed_peak import PeakJson, TimeUnit
from treadle.simulator.printed_step import MetricsJson, PathJson
from treadle.synthesize.printed_synthesis import SynthesisJson
from treadle.weights.printed_update import UpdateMetricsJson


class SimulateJson(MetricsJson):
    """`treadle simulate`, of a pipeline."""

    about: Annotated[str, "The assumptions of a prediction, or where a measurement was made."]
    critical_path: Annotated[PathJson, "The chain of ops that makes the step as long as it is."]
    taken_as_zero: Annotated[list[str], "Times that the costs lack, taken as 0."]


class SimulateUpdateJson(UpdateMetricsJson):
    """`treadle simulate`, of a weight update."""

    about: Annotated[str, "The assumptions of a prediction, or where a measurement was made."]
    critical_path: Annotated[PathJson, "The chain of ops that makes the step as long as it is."]
    taken_as_zero: Annotated[list[str], "Times that the costs lack, taken as 0."]


class SynthesizeJson(SynthesisJson):
    """`treadle synthesize`."""

    bubble: Annotated[Share, "The idle share of the rank with the longest span, in that span, from 0 to 1."]
    peak: Annotated[PeakJson, "What ranks hold at most."]
    schedule: Annotated[str, "The schedule in the text form, which every command reads."]


class ImportedStepJson(TypedDict):
    """A step of a profile."""

    step: Annotated[Count, "The number of the step in the run."]
    makespan: Annotated[Amount, "From its first start to its last end."]


class RemarkJson(TypedDict):
    """A remark about a profile."""

    what: Annotated[str, "A sentence."]
    source: Annotated[str, "The file, or empty."]
    times: Annotated[CountFrom1, "How often."]


class ImportJson(TypedDict):
    """`treadle import`."""

    form: Annotated[str, "The form of the files."]
    unit: Annotated[str, OneOf(("us",)), "The unit of all times here."]
    schedule: Annotated[str | None, "The name of the schedule that ran; null where it is none that Treadle generates."]
    pp: Annotated[CountFrom1, "Ranks of the pipeline."]
    vpp: Annotated[CountFrom1, "Chunks on each rank."]
    dp: Annotated[CountFrom1, "Replicas of the pipeline."]
    microbatches: Annotated[CountFrom1, "Micro-batches in a step."]
    placement: Annotated[list[list[Count]], "The stages of each rank."]
    step: Annotated[
        Count,
        "The step that makespan and bubble are of: the one asked for, or the one whose makespan is the median's "
        "nearest.",
    ]
    makespan: Annotated[Amount, "From the first start to the last end of that step."]
    bubble: Annotated[float, "The idle share of the rank with the longest span, in that step."]
    steps: Annotated[list[ImportedStepJson], "All steps that are whole on all ranks."]
    remarks: Annotated[list[RemarkJson], "What could not be read, or was not as expected."]


class CutStageJson(TypedDict):
    """A stage of a cut."""

    blocks: Annotated[str, "Its blocks; d is a dense layer."]
    time: Annotated[Amount, "Its forward and backward of one micro-batch."]
    saved: Annotated[Amount, "What it saves of one micro-batch between them, in saved_unit."]


class CutStepJson(TypedDict):
    """The simulated step of a cut."""

    makespan: Annotated[Amount, "From the first start to the last end."]
    bubble: Annotated[Share, "The share of time in which compute is idle, from step to step."]
    peak: Annotated[Amount, "The most that a rank holds at once, in saved_unit."]


class CutJson(TypedDict):
    """A cut."""

    name: Annotated[str, "default, balanced, or the --layout as given."]
    layout: Annotated[str, "The cut as Megatron reads it; dense layers are t."]
    slowest_stage: Annotated[Count, "The first stage that takes the longest."]
    slowest_stage_time: Annotated[Amount, "Its forward and backward of one micro-batch."]
    slowest_rank: Annotated[Count, "The first rank whose stages take the longest together."]
    slowest_rank_time: Annotated[Amount, "The forwards and backwards of its stages, of one micro-batch."]
    stages: Annotated[list[CutStageJson], "The stages along the pipe."]
    step: Annotated[CutStepJson | None, "The simulated step; null without a schedule."]


class BalanceJson(TypedDict):
    """`treadle balance`."""

    unit: TimeUnit
    saved_unit: Annotated[
        str,
        OneOf(("bytes", "layers")),
        "The unit of what is saved and of peaks: bytes, or layers if the costs have no bytes.",
    ]
    model: Annotated[str, "The blocks of the whole model in order: E, t, d, m, L."]
    placement: Annotated[list[list[Count]], "The stages of each rank, chunk by chunk."]
    schedule: Annotated[str | None, "The schedule that steps are simulated under; null without one."]
    microbatches: Annotated[CountFrom1 | None, "Micro-batches of these steps; null without a schedule."]
    cuts: Annotated[list[CutJson], "The default cut, the balanced one, and each --layout as given."]


class FamilyJson(TypedDict):
    """A schedule of the list."""

    name: Annotated[str, "The name that commands take."]
    summary: Annotated[str, "What it is, in a sentence."]
    demands: Annotated[str, "The sizes it takes."]
    bubble: Annotated[str, "Idle time of a rank, as a formula."]
    memory: Annotated[str, "Activations held at most, as a formula."]
    trainers: Annotated[list[str], "Public trainers that run it, with its name there; a plan searches those with one."]
    source: Annotated[str, "Where it was published, or whose it is."]


class SchedulesJson(TypedDict):
    """`treadle schedules`."""

    schedules: Annotated[list[FamilyJson], "Built-in schedules, then those of other packages."]


class ExplanationJson(TypedDict):
    """A finding in words."""

    title: Annotated[str, "The finding in a few words."]
    meaning: Annotated[str, "What it means and why it matters."]
    example: Annotated[str, "Rows or ops that have it."]
    wayout: Annotated[str, "What to do."]


class ExplainJson(TypedDict):
    """`treadle explain`."""

    findings: Annotated[
        dict[Annotated[str, Text("^T[0-9]{3}$")], ExplanationJson],
        "By code: the one asked for, or all.",
    ]


class LackJson(TypedDict):
    """Entries that a costs file lacks."""

    names: Annotated[list[str], "The entries that are missing."]
    effect: Annotated[str, "What follows from it, in a sentence."]


class CostsCheckJson(TypedDict):
    """`treadle costs check`."""

    file: Annotated[str, "The file's path, as given."]
    right: Annotated[bool, "True if there are no problems."]
    problems: Annotated[list[ProblemJson], "What is wrong, in the order of the lines."]
    lacks: Annotated[list[LackJson], "Entries that a right file lacks, and for which options that matters."]


class ChannelJson(TypedDict):
    """What a rank sent or received on a channel."""

    messages: Annotated[Count, "Messages in the step."]
    bytes: Annotated[Count, "Their size, in bytes."]


class DryrunJson(TypedDict):
    """`treadle dryrun`."""

    world: Annotated[CountFrom1, "Ranks in the world."]
    rank: Annotated[Count, "The rank that ran."]
    pp_rank: Annotated[Count, "Its place along the pipeline."]
    dp_rank: Annotated[Count, "Its place along data parallelism."]
    channels: Annotated[
        dict[Annotated[str, Text("^[0-9]+>[0-9]+$")], ChannelJson],
        "By channel, such as 1>2 (places along the pipeline), what the rank sent or received.",
    ]
    groups: Annotated[
        dict[str, CountFrom1],
        "The rank's process groups by name (pipe, replicas, copies), and how many ranks each has.",
    ]
    communicators: Annotated[Count, "Communicators the rank would make: channels and groups."]
    parameter_bytes: Annotated[Count, "Bytes of its parameters."]
    gradient_bytes: Annotated[Count, "Bytes that gradients take while they are summed."]
    peak_saved_bytes: Annotated[Count, "Bytes saved for backwards at most."]
    peak_buffer_bytes: Annotated[Count, "Bytes of receive buffers at most."]
    peak_bytes: Annotated[Count, "Bytes of all its tensors at most; where the first stage is, the batch is among them."]
    peak_at: Annotated[str, "The op at which it holds most."]
    disagreements: Annotated[
        list[str],
        "Where the rank differs from the verified program, or ranks from each other; empty if nowhere.",
    ]


class UpdateJson(TypedDict):
    """`treadle update`."""

    version: Annotated[CountFrom1, "The version that all workers serve now."]
    attempt: Annotated[CountFrom1, "The attempt's number; those of failed attempts are not used again."]
    bytes: Annotated[Count, "Bytes broadcast, each counted once; 0 where nothing had to move."]
    rollback_bytes: Annotated[Count, "Bytes of the rollback copy that the worker of rank 0 held until commit."]
    rollbacks: Annotated[Count, "How often that worker has gone back to an old version since it started."]
    seconds: Annotated[
        dict[str, Amount],
        "Elapsed time by phase, in seconds: enter (includes waiting for the engine), settle, layout, plan, begin, "
        "load (the bytes move), finish, open; and total.",
    ]
    notes: Annotated[
        list[str],
        "What the plan left out for want of memory, why all tensors moved, which workers left the set.",
    ]


class AcceleratorJson(TypedDict):
    """An accelerator of a machine."""

    type: Annotated[str, "Its type, such as cuda."]
    index: Annotated[Count, "Its number."]
    name: Annotated[str, "Its name."]
    memory_bytes: Annotated[Count, "Its memory; 0 if torch does not report it."]


class MachineJson(TypedDict):
    """A machine that was checked."""

    treadle: Annotated[str, "Treadle's version."]
    python: Annotated[str, "Python's version."]
    torch: Annotated[str, "torch's version."]
    cuda: Annotated[str | None, "The version of CUDA that torch was built with; null without."]
    hip: Annotated[str | None, "The same of ROCm."]
    nccl: Annotated[str | None, "NCCL's version; null where torch has none."]
    backends: Annotated[list[str], "Backends of process groups that torch has."]
    platform: Annotated[str, "Operating system, its release, and the processor."]
    executable: Annotated[str, "The Python that ran."]
    num_cpus: Annotated[int | None, "Processors that this process may use."]
    devices: Annotated[list[AcceleratorJson], "Accelerators, empty without."]


class CheckJson(TypedDict):
    """A check of a machine."""

    name: Annotated[str, "Its name."]
    status: Annotated[str, OneOf(("passed", "skipped", "failed")), "What became of it."]
    about: Annotated[str, "What was found; why it was skipped; what failed."]
    advice: Annotated[str, "What to do where it failed, else empty."]
    seconds: Annotated[Amount, "How long it took."]
    numbers: Annotated[
        dict[str, float],
        "What it measured: *_ms in milliseconds, *_bytes in bytes, ratio measured over predicted, off_by and the "
        "names of types the largest distance of a gradient over its largest entry, hidden a share of "
        "communication.",
    ]


class SelfcheckJson(TypedDict):
    """`treadle selfcheck`."""

    ok: Annotated[bool, "True if nothing failed."]
    num_passed: Annotated[Count, "Checks that passed."]
    num_skipped: Annotated[Count, "Checks that could not run here."]
    num_failed: Annotated[Count, "Checks that failed."]
    device_type: Annotated[str, "The type of the ranks' devices."]
    backend: Annotated[str, "The backend of their process group."]
    num_ranks: Annotated[Count, "Ranks."]
    quick: Annotated[bool, "Was it a shorter run."]
    seconds: Annotated[Amount, "How long all of it took."]
    machine: Annotated[MachineJson, "Versions and devices."]
    settings: Annotated[
        dict[str, str],
        "Variables of the environment that torch, NCCL, gloo and OpenMP read, as far as they are set.",
    ]
    checks: Annotated[list[CheckJson], "All checks, in the order in which they ran."]
