"""A candidate with what a search knows of it: its memory, the least time of its step, and the simulated one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from treadle.costs import Costs
from treadle.estimate import Job
from treadle.estimate.job import OFFLOADED
from treadle.estimate.job_memory import MemoryEstimate, estimate_memory
from treadle.estimate.op_costs import estimate_costs
from treadle.planner.least_time import least_ticks, model_ticks
from treadle.planner.simulated_step import StepTime, simulate_step, simulate_whole
from treadle.planner.space import Candidate
from treadle.planner.stage_layout import layout
from treadle.planner.structure import Structure, recomputed_ops


@dataclass(frozen=True)
class JobEstimate:
    """A candidate with its memory, the least time its step can take, and the simulated one where it was needed.

    With offload, peak memory is known only after simulation; before it, what may be offloaded is left out.
    """

    job: Job
    costs: Costs
    structure: Structure
    memory: tuple[MemoryEstimate, ...]
    least: int
    ticks: int | None = None

    @property
    def memory_bytes(self) -> int:
        """Bytes of the rank that holds most."""
        return max(rank.total for rank in self.memory)

    @property
    def step_s(self) -> float:
        """Seconds of a step, simulated or at least."""
        return self._seconds(self.ticks if self.ticks is not None else self.least)

    @property
    def least_s(self) -> float:
        """Seconds that a step takes at least."""
        return self._seconds(self.least)

    def _seconds(self, ticks: int) -> float:
        return ticks / self.costs.clock.ticks / 1e6

    def simulated(self) -> JobEstimate:
        """Return it with the simulated time."""
        if self.ticks is not None:
            return self
        return self.with_step(simulate_step(self.structure, self.job.num_microbatches, self.costs))

    def simulated_whole(self) -> JobEstimate:
        """Return it with the time of all its micro-batches."""
        return self.with_step(simulate_whole(self.structure, self.job.num_microbatches, self.costs))

    def with_step(self, step: StepTime) -> JobEstimate:
        """Return it with a simulated step, and with what the step holds where activations are offloaded."""
        memory = estimate_memory(self.job, held=step.held) if self.job.offload else self.memory
        return replace(self, ticks=step.ticks, memory=memory)


@dataclass(frozen=True)
class Alternative:
    """The best job that has another value of one knob, and otherwise is the chosen one."""

    knob: str
    value: str
    estimate: JobEstimate
    fits: bool
    slower: float | None
    """Share by which its step is longer; None where it does not fit."""

    reason: str


def estimate_candidate(candidate: Candidate) -> JobEstimate:
    """Estimate a candidate's costs and memory, lay out its stages, and bound its time."""
    job = candidate.job
    if job.layout is not None:
        return estimate_job(job)
    blocks = _layout(replace(job, offload=()), balanced=candidate.balanced)
    return estimate_job(replace(job, layout=blocks))


@lru_cache(maxsize=256)
def _layout(job: Job, *, balanced: bool, light: bool = False) -> tuple[str, ...]:
    """Return the stages of a job; offload does not matter to that."""
    costs = _block_costs(_one_rank(job))
    return layout(costs, job.model.blocks, job.schedule, job.pp, job.vpp, balanced=balanced, light=light)


def with_light_stages(estimate: JobEstimate) -> JobEstimate:
    """Return the job with stages whose first rank keeps less, as the embedding counts as a layer."""
    plain = replace(estimate.job, layout=None, offload=())
    stages = _layout(plain, balanced=True, light=True)
    return estimate if stages == estimate.job.layout else estimate_job(replace(estimate.job, layout=stages))


def estimate_job(job: Job) -> JobEstimate:
    """Estimate the costs and memory of a job that has its layout, and bound its time."""
    assert job.layout is not None
    again = recomputed_ops(job)
    costs = estimate_costs(job, inline_recompute=again != job.recompute)
    least = least_ticks(costs, job.layout, job.schedule, job.pp, job.vpp, job.num_microbatches, again)
    memory = estimate_memory(job, held=(0,) * job.pp)  # at least, where it offloads
    return JobEstimate(job, costs, Structure.of(job, job.layout, costs), memory, least)


def least_of_sizes(job: Job) -> int:
    """Return ticks that no step of these sizes beats, whatever is recomputed and how stages are cut.

    The fullest rank has at least the mean of all ranks to do.
    """
    plain = replace(job, layout=None, recompute=(), offload=Job.offload, sharding=Job.sharding)
    ticks = model_ticks(_block_costs(_one_rank(plain)), job.model.blocks, job.schedule, job.num_stages)
    return ticks * job.num_microbatches // job.pp


def _one_rank(job: Job) -> Job:
    """Return the job on a pipeline of one rank, whose blocks take as long."""
    batch = job.micro_batch_size * job.dp * job.pp
    return replace(job, pp=1, vpp=1, schedule=Job.schedule, global_batch_size=batch)


@lru_cache(maxsize=4096)
def _block_costs(job: Job) -> Costs:
    """Return what blocks take at least: no layout matters to that, and overlap takes the host no less."""
    return estimate_costs(job)


def describe(job: Job) -> str:
    """Return a job's knobs in a line."""
    sizes = {"TP": job.tp, "CP": job.cp, "PP": job.pp, "VPP": job.vpp, "EP": job.ep, "DP": job.dp}
    named = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1 or name in ("TP", "PP", "DP"))
    extra = [f"recompute {'+'.join(job.recompute)}"] if job.recompute else []
    extra += [f"offload {'all' if job.offload == OFFLOADED else '+'.join(job.offload)}"] if job.offload else []
    extra += [f"{job.sharding} sharded"] if job.sharding != Job.sharding else []
    extra += [f"{job.cuda_graph} CUDA graphs"] if job.cuda_graph != Job.cuda_graph else []
    extra += ["BF16 gradients"] if job.gradient_bytes != Job.gradient_bytes else []
    extra += ["BF16 moments"] if job.moment_bytes != Job.moment_bytes else []
    extra += ["FP8 saved"] if job.saved != Job.saved else []
    return ", ".join([f"{job.schedule} {named} MBS{job.micro_batch_size}", *extra])
