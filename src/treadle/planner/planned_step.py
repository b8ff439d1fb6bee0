"""The chosen job in full: its Program of all micro-batches, verified, simulated and measured."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.estimate.flops import model_flops
from treadle.estimate.host_copies import host_bytes
from treadle.ir import Schedule
from treadle.ir.trace import Trace
from treadle.planner.job_estimate import JobEstimate
from treadle.planner.step_parts import step_parts
from treadle.simulator import Metrics, measure
from treadle.step import Step
from treadle.verifier import VerifyReport


@dataclass(frozen=True)
class PlannedStep:
    """A job whose step is simulated whole. Its Program is the one that every other command makes from its files."""

    estimate: JobEstimate
    schedule: Schedule
    trace: Trace
    metrics: Metrics
    report: VerifyReport
    num_tokens: int
    """Of the whole run."""

    @classmethod
    def of(cls, estimate: JobEstimate, num_tokens: int = 10**12) -> PlannedStep:
        """Lower, verify and simulate a job of a run on so many tokens."""
        schedule = estimate.structure.generate(estimate.job.num_microbatches)
        step = Step(schedule, estimate.costs, estimate.structure.options)
        return cls(estimate, schedule, step.trace, measure(step.trace), step.report, num_tokens)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.trace.makespan / self.trace.clock.ticks / 1e6

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part of the step, on a rank on average; they add up to it."""
        return step_parts(self.estimate, self.trace, self.metrics)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens that a GPU trains on in a second."""
        job = self.estimate.job
        return job.global_batch_size * job.seq_len / self.step_s / job.cluster.num_gpus

    @property
    def gpu_hours(self) -> float:
        """The hours of GPUs that the whole run takes."""
        return self.num_tokens / self.tokens_per_s_per_gpu / 3600

    @property
    def days(self) -> float:
        """The days that the whole run takes."""
        return self.gpu_hours / self.estimate.job.cluster.num_gpus / 24

    @property
    def flops_per_s_per_gpu(self) -> float:
        """Floating-point operations of the model, without what is recomputed, that a GPU does in a second."""
        job = self.estimate.job
        return model_flops(job.model, job.seq_len) * job.global_batch_size / self.step_s / job.cluster.num_gpus

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: of what the GPU can do at most in this precision."""
        job = self.estimate.job
        return self.flops_per_s_per_gpu / job.cluster.peak(job.precision)

    @property
    def host_bytes(self) -> int:
        """Bytes that a GPU's offloaded activations take on the host, at most."""
        return host_bytes(self.estimate.job)

    @property
    def exposed_share(self) -> float:
        """Share of the step in which a rank, on average, waits for communication that nothing hides."""
        return self.metrics.exposed / max(1, self.metrics.makespan)
