"""What a run would do, without doing it."""

from __future__ import annotations

from treadle.train.config import TrainConfig
from treadle.train.parallel import ParallelPlan, ranks_of


def describe(config: TrainConfig) -> str:
    """Return what a run would do: its ranks, its stages and their blocks, its schedule and its batch.

    Raises:
        ValueError: sizes that do not fit each other.

    """
    plan = ParallelPlan.of(config, ranks_of(config.parallel))
    training = config.training
    lines = [
        f"ranks      {plan.pp * plan.num_replicas} = pp {plan.pp} x dp {plan.dp} x ep {plan.ep}",
        f"schedule   {config.parallel.schedule}, {plan.num_microbatches} micro-batches of {training.micro_batch_size} "
        f"samples on each of {plan.num_replicas} replicas",
        f"step       {training.global_batch_size * training.seq_len:,} tokens",
    ]
    for rank in range(plan.pp):
        stages = ", ".join(f"stage {stage} {plan.rows[stage]}" for stage in plan.stages_of(rank).values())
        lines.append(f"pp rank {rank}  {stages}")
    return "\n".join(lines)
