"""Programs by what they depend on. Costs are not among it, so one Program serves all jobs of its structure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from treadle.costs import Costs
from treadle.estimate import Job
from treadle.estimate.job_stages import is_tied
from treadle.ir import Schedule
from treadle.ir.program import Program
from treadle.ir.trace import MICROSECONDS
from treadle.lowering.lower import choose, lower
from treadle.lowering.options import LoweringOptions
from treadle.passes.layer_lanes import lower_layers
from treadle.passes.step_end import reduces
from treadle.schedules import generate

_KEPT_SCHEDULES = 24
"""Schedules that are kept: structures with other layouts, recomputation or offload share them."""
_KEPT = 64
"""Programs that are kept: jobs of one structure come in a row, each with a few numbers of micro-batches."""


class Variant(NamedTuple):
    """The choices that `treadle.lower` makes by simulation."""

    hold: bool = False
    early: bool = False
    early_recompute: bool = False


@dataclass(frozen=True)
class Structure:
    """All that a Program depends on besides the number of its micro-batches."""

    schedule: str
    pp: int
    vpp: int
    options: LoweringOptions
    """As `treadle simulate` has them with the options of a plan; `dp` is 2 for any number of GPU columns above 1."""

    step_end: tuple[str, ...]

    @classmethod
    def of(cls, job: Job, blocks: tuple[str, ...], costs: Costs) -> Structure:
        """Return the structure of a job's Program."""
        ep, dp = columns(job)
        options = LoweringOptions(
            blocks=blocks,
            by_layer=True,
            moe=job.model.is_moe,
            padded=True,
            recompute=recomputed_ops(job),
            offload=bool(job.offload),
            tied=((0, -1),) if is_tied(job) else (),
            dp=2 if ep * dp > 1 else 1,
        )
        return cls(job.schedule, job.pp, job.vpp, options, tuple(sorted(costs.step)))

    @property
    def blocks(self) -> tuple[str, ...]:
        """The blocks of each stage."""
        return self.options.blocks or ()

    def generate(self, microbatches: int) -> Schedule:
        """Return its schedule of so many micro-batches."""
        return _generated(self.schedule, self.pp, self.vpp, microbatches)

    def lower(self, microbatches: int, costs: Costs) -> Program:
        """Return the Program that every command makes of a job's files, with the choices that its costs lead to."""
        return lower(self.generate(microbatches), costs, self.options)

    def program(self, microbatches: int, variant: Variant) -> Program:
        """Return the Program of so many micro-batches, whatever their costs."""
        return _lowered(self, microbatches, variant)


def recomputed_ops(job: Job) -> tuple[str, ...]:
    """Return the parts of layers that ops of a Program compute again: attn, mlp.

    Smaller parts, and layers of which only some are computed again, have no ops: their costs are in the backwards.
    """
    return job.recompute if set(job.recompute) <= {"attn", "mlp"} and not job.recompute_layers else ()


def columns(job: Job) -> tuple[int, int]:
    """Return the columns of GPUs that an expert group has, and the number of groups.

    A column is a tensor-parallel group on every rank of the pipeline. Expert groups reach into it first.
    """
    ep = expert_columns(job, job.tp)
    return ep, max(1, job.dp * job.cp // ep)


def expert_columns(job: Job, size: int) -> int:
    """Return the groups of `size` GPUs that an expert group reaches over."""
    reach = job.ep * job.etp if job.model.is_moe else 1
    return reach // gcd(reach, size)


@lru_cache(maxsize=_KEPT_SCHEDULES)
def _generated(schedule: str, pp: int, vpp: int, microbatches: int) -> Schedule:
    return generate(schedule, pp=pp, vpp=vpp, microbatches=microbatches)


@lru_cache(maxsize=_KEPT)
def _lowered(structure: Structure, microbatches: int, variant: Variant) -> Program:
    schedule = structure.generate(microbatches)
    costs = Costs("structure", MICROSECONDS, step=dict.fromkeys(structure.step_end, 1))
    shape = choose(schedule, costs, replace(structure.options, **variant._asdict()))
    return lower_layers(schedule, shape, reduce=reduces(schedule.placement, structure.options.dp))
