"""How a configuration's model, schedule and batch fall on a number of ranks: decided without any process."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.ir import Schedule
from treadle.ir.blocks import parse_layout
from treadle.passes.cut import cut_evenly
from treadle.schedules import generate
from treadle.train.run_config import ParallelConfig, TrainConfig


@dataclass(frozen=True)
class ParallelPlan:
    """The mesh, the schedule and the blocks of each stage.

    Example:
        >>> plan = ParallelPlan.of(TrainConfig(parallel=ParallelConfig(pp=2, ep=2)), world_size=4)
        >>> plan.rows, plan.num_replicas, plan.num_microbatches, plan.stages_of(1)
        (('Ett', 'ttL'), 2, 8, {0: 1})

    """

    pp: int
    dp: int
    ep: int
    schedule: Schedule
    rows: tuple[str, ...]
    """The block letters of each stage."""

    @classmethod
    def of(cls, config: TrainConfig, world_size: int) -> ParallelPlan:
        """Return the plan for a number of ranks.

        Raises:
            ValueError: sizes that do not fit each other; the message names the nearest that do.

        """
        pp, dp, ep = mesh_sizes(config.parallel, world_size)
        parallel, num = config.parallel, config.num_microbatches(dp * ep)
        schedule = generate(parallel.schedule, pp=pp, vpp=parallel.vpp, microbatches=num)
        num_stages = schedule.placement.num_stages
        rows = parse_layout(parallel.layout) if parallel.layout else cut_evenly(config.model.blocks, num_stages)
        if len(rows) != num_stages:
            raise ValueError(
                f"{parallel.schedule} with pp={pp} has {num_stages} stages, got {len(rows)} in parallel.layout "
                f"{parallel.layout!r}; write {num_stages - 1} bars, or leave it out"
            )
        return cls(pp, dp, ep, schedule, rows)

    @property
    def num_replicas(self) -> int:
        """The number of pipelines, each with samples of its own."""
        return self.dp * self.ep

    @property
    def num_microbatches(self) -> int:
        """The micro-batches of each replica in a step."""
        return self.schedule.num_microbatches

    def stages_of(self, pp_rank: int) -> dict[int, int]:
        """Return the stage of each chunk of a rank along the pipeline."""
        placement = self.schedule.placement
        return {chunk: placement.stage(pp_rank, chunk) for chunk in range(self.schedule.vpp)}


def ranks_of(parallel: ParallelConfig) -> int:
    """Return the number of ranks that a configuration needs at least."""
    return parallel.pp * (parallel.dp or 1) * parallel.ep


def mesh_sizes(parallel: ParallelConfig, world_size: int) -> tuple[int, int, int]:
    """Return (pp, dp, ep) for a number of ranks.

    Raises:
        ValueError: the sizes do not make this number of ranks; the message names those that would.

    Example:
        >>> mesh_sizes(ParallelConfig(pp=2, ep=2), 8)
        (2, 2, 2)

    """
    pp, ep = parallel.pp, parallel.ep
    dp = parallel.dp if parallel.dp is not None else max(1, world_size // (pp * ep))
    if pp * dp * ep != world_size:
        raise ValueError(
            f"parallel.pp x dp x ep = {pp} x {dp} x {ep} are {pp * dp * ep} ranks, got {world_size}; start "
            f"`torchrun --nproc-per-node {pp * dp * ep}`, or change the sizes"
        )
    return pp, dp, ep
