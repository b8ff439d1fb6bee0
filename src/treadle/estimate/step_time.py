"""The time of a step in closed form: the slowest rank's work, the bubble of the schedule, and what ends a step.

It takes a fraction of a millisecond and needs no Program. Simulating the job's schedule with `estimate_costs` is exact
about order and overlap; this one is for bounds, for sorting many candidates, and for fitting constants.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from treadle.estimate.bubbles import ChunkTimes, bubble_seconds
from treadle.estimate.flops import model_flops
from treadle.estimate.job import Job
from treadle.estimate.messages import gather, send
from treadle.estimate.parts import actions, block_work
from treadle.estimate.rates import PeakTimes, add, at_peak, constant, factors, seconds
from treadle.estimate.stages import rank_rows
from treadle.ir.blocks import LAYERS
from treadle.schedules import family

ADAM_BYTES = 30
"""Read and written for a parameter by Adam: FP32 gradient, weight and moments, and the BF16 weight."""

GRAD_BYTES = 4
PARAM_BYTES = 2


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Seconds of a step and what they are made of. The parts add up to `seconds`."""

    seconds: float
    compute: float
    """Kernels of the slowest rank, and its launches."""

    recompute: float
    """Of the same rank: forwards computed again."""

    exposed_tp: float
    """Collectives of tensor and context parallelism, as far as nothing hides them; and of experts below."""

    exposed_ep: float
    exposed_pp: float
    bubble: float
    data_parallel: float
    """Gradients reduced and parameters gathered, as far as nothing hides them."""

    optimizer: float
    other: float
    tokens_per_s_per_gpu: float
    mfu: float
    """Share of the peak rate, in the job's precision, of the model's own FLOPs; recomputation does not count."""

    slowest_rank: int


class JobTimes:
    """Peak times of a job's blocks; equal for jobs that differ in schedule, layout and batch only."""

    def __init__(self, job: Job) -> None:
        model = job.model
        letters = sorted(set(model.blocks))
        self.actions = {
            block: {name: at_peak(work, job.cluster, job.precision) for name, work in actions(job, block).items()}
            for block in letters
        }
        parts = {block: block_work(job, block).values() for block in letters}
        self.parameters = {block: sum(part.parameters for part in parts[block]) for block in letters}
        self.experts = {block: sum(part.expert_parameters for part in parts[block]) for block in letters}
        self.factors = factors(job)
        redone = {"attn_r", "mlp_r"} if "full" in job.recompute else {f"{part}_r" for part in job.recompute}
        self.phases = {block: {phase: self._sum(block, phase, redone) for phase in "fbwr"} for block in letters}
        self.step = {block: add(*(self.phases[block][phase] for phase in "fbw")) for block in letters}

    def _sum(self, block: str, phase: str, redone: set[str]) -> PeakTimes:
        """A phase of a block: f, b, w, or r for its whole parts that are computed again."""
        named = self.actions[block].items()
        return add(*(times for name, times in named if name[-1] == phase and (phase != "r" or name in redone)))


@lru_cache(maxsize=4096)
def _cached(job: Job) -> JobTimes:
    return JobTimes(job)


def job_times(job: Job) -> JobTimes:
    """Return the peak times of a job's blocks."""
    return _cached(
        replace(
            job,
            vpp=1,
            schedule=Job.schedule,
            layout=None,
            offload=False,
            a2a_overlap=False,
            recompute_layers=0,
            sharding="optimizer",
            global_batch_size=job.micro_batch_size * job.dp,
        )
    )


def estimate_step(job: Job) -> StepEstimate:
    """Estimate the time of a step.

    Raises:
        ValueError: the model cannot be cut into so many stages, or the GPU does not do the job's precision.

    Example:
        >>> from treadle.estimate import Job, load_cluster, load_model
        >>> job = Job(load_model("llama3-70b"), load_cluster("h100:64"), tp=4, pp=4, vpp=5, schedule="interleaved",
        ...           global_batch_size=128, seq_len=8192)
        >>> 10 < estimate_step(job).seconds < 20
        True

    """
    times = job_times(job)
    by = times.factors
    block = {name: seconds(each, by) for name, each in times.step.items()}
    again = {name: seconds(each["r"], by) for name, each in times.phases.items()}
    rows = rank_rows(job)
    pipes = job.placement.num_pipes
    ranks = [_of_rank(job, chunks, block, again) / pipes for chunks in rows]
    slowest = max(range(len(ranks)), key=ranks.__getitem__)
    share = _exposed_ep(job)
    blocks = "".join(rows[slowest])
    ep = sum(_ep(times.step[letter], by) for letter in blocks) / pipes
    net = ranks[slowest] - (1 - share) * ep
    exposed_pp = 2 * job.vpp / pipes * _send_seconds(job) * (1 - constant(job.cluster, "pp_hidden"))
    fill = bubble_seconds(job.schedule, job.pp, _mean_chunk(rows, slowest, times))
    count = job.num_microbatches
    data_parallel, optimizer = _step_end(job, times, blocks)
    other = 1e-6 * constant(job.cluster, "step_us")
    total = count * (net + exposed_pp) + fill + data_parallel + optimizer + other
    redone = sum(_again(job, chunks, again) for chunks in rows[slowest]) / pipes
    links = sum(_tp(times.step[letter], by) for letter in blocks) / pipes
    tokens = job.global_batch_size * job.seq_len
    gpus = job.cluster.num_gpus
    flops = model_flops(job.model, job.seq_len) * job.global_batch_size
    return StepEstimate(
        seconds=total,
        compute=count * (ranks[slowest] - ep - links - redone),
        recompute=count * redone,
        exposed_tp=count * links,
        exposed_ep=count * share * ep,
        exposed_pp=count * exposed_pp,
        bubble=fill,
        data_parallel=data_parallel,
        optimizer=optimizer,
        other=other,
        tokens_per_s_per_gpu=tokens / total / gpus,
        mfu=flops / total / gpus / job.cluster.peak(job.precision),
        slowest_rank=slowest,
    )


def _mean_chunk(rows: tuple[tuple[str, ...], ...], slowest: int, times: JobTimes) -> ChunkTimes:
    """The mean chunk of all ranks but the slowest: what fills and drains the pipe around it."""
    counts: dict[str, int] = {}
    others = [row for rank, chunks in enumerate(rows) if rank != slowest for row in chunks]
    for row in others:
        for letter in row:
            counts[letter] = counts.get(letter, 0) + 1
    by, phases = times.factors, times.phases
    whole = {
        phase: sum(count * seconds(phases[letter][phase], by) for letter, count in counts.items()) for phase in "fbwr"
    }
    number = max(1, len(others))
    return ChunkTimes(whole["f"] / number, (whole["b"] + whole["r"]) / number, whole["w"] / number)


def _of_rank(job: Job, chunks: tuple[str, ...], block: dict[str, float], again: dict[str, float]) -> float:
    """Seconds of a micro-batch through the chunks of a rank, nothing hidden."""
    return sum(block[letter] for row in chunks for letter in row) + sum(_again(job, row, again) for row in chunks)


def _again(job: Job, row: str, again: dict[str, float]) -> float:
    """Seconds of the whole parts of a stage's layers that are computed again."""
    layers = [letter for letter in row if letter in LAYERS]
    return sum(again[letter] for letter in layers[: job.recompute_layers or len(layers)])


def _ep(times: PeakTimes, by: PeakTimes) -> float:
    return times.ep_nvlink * by.ep_nvlink + times.ep_nic * by.ep_nic


def _tp(times: PeakTimes, by: PeakTimes) -> float:
    return times.tp * by.tp + times.cp * by.cp


def _exposed_ep(job: Job) -> float:
    overlapped = job.a2a_overlap or family(job.schedule).overlapped
    return 1 - constant(job.cluster, "ep_hidden") if overlapped else 1.0


def _send_seconds(job: Job) -> float:
    return sum(message.seconds(job.cluster) for message in send(job)) / constant(job.cluster, "pp")


def _step_end(job: Job, times: JobTimes, blocks: str) -> tuple[float, float]:
    """Seconds of gradient reduction and parameter gathering that show, and of the optimizer, of a rank."""
    cluster = job.cluster
    dense = sum(times.parameters[letter] for letter in blocks)
    experts = sum(times.experts[letter] for letter in blocks)
    optimizer = optimizer_seconds(job, dense, experts)
    if job.sharding == "parameters":
        each = data_parallel_seconds(job, dense, experts, GRAD_BYTES + 2 * PARAM_BYTES)
        return job.num_microbatches * each * (1 - constant(cluster, "fsdp_hidden")), optimizer
    moved = data_parallel_seconds(job, dense, experts, GRAD_BYTES + PARAM_BYTES)
    return moved * (1 - constant(cluster, "dp_hidden")) + ring_seconds(job, dense), optimizer


def ring_seconds(job: Job, parameters: float) -> float:
    """Return the seconds that rings of gradients and parameters take besides their bytes.

    Each bucket goes around all ranks of dp. Buckets are Megatron's: 40 million parameters, or 1 million a rank of dp if
    that is more.
    """
    ranks = job.num_holders
    if ranks == 1:
        return 0.0
    buckets = parameters / max(40e6, 1e6 * ranks)
    return 2 * buckets * (ranks - 1) * 1e-6 * constant(job.cluster, "ring_us")


def data_parallel_seconds(job: Job, dense: float, experts: float, size_bytes: int) -> float:
    """Return the seconds to reduce-scatter or all-gather so many parameters over their replicas."""
    messages = gather(job, "dp", dense * size_bytes) + gather(job, "expert_dp", experts * size_bytes)
    return sum(message.seconds(job.cluster) for message in messages) / constant(job.cluster, "dp")


def optimizer_seconds(job: Job, dense: float, experts: float) -> float:
    """Return the seconds of the optimizer's step on a rank's share of the parameters."""
    cut = job.sharding != "none"
    held = dense / (job.num_holders if cut else 1) + experts / (job.num_expert_holders if cut else 1)
    return held * ADAM_BYTES / job.cluster.memory_bandwidth / constant(job.cluster, "optimizer")
