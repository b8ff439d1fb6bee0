"""A run described before it runs: stages, schedule, memory by part, the predicted step. One process, no group, no GPU.

    print(describe(TrainConfig(parallel=ParallelConfig(pp=16, ep=64, dp=2))))

Memory is counted, not estimated: a Pipeline runs one block of each kind on the meta device (`treadle.train.footprint`),
and a simulated step adds up what is there at each moment. What it cannot know: how unevenly routers send rows to
experts, what kernels and collectives allocate inside, and what an allocator wastes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.costs import UNIT_COSTS, missing
from treadle.simulator import measure, simulate
from treadle.train.fitted_costs import NAME, find_costs
from treadle.train.footprint import ParameterShape
from treadle.train.parallel import ParallelPlan
from treadle.train.run_config import TrainConfig
from treadle.train.run_memory import ORDER_COSTS, RankMemory, RunMemory

_PARTS = ("parameters", "gradients", "optimizer", "activations", "temporaries", "messages", "total")


@dataclass(frozen=True)
class DryRun:
    """What a run would do. `str()` of it is the text that `--dry-run` prints.

    Example:
        >>> from treadle.train.run_config import ParallelConfig
        >>> dry = describe(TrainConfig(parallel=ParallelConfig(pp=2, ep=2)))
        >>> dry.plan.rows, len(dry.ranks), dry.tokens_per_step
        (('Ett', 'ttL'), 2, 2048)

    """

    config: TrainConfig
    plan: ParallelPlan
    ranks: tuple[RankMemory, ...]
    """A rank of each place along the pipeline; its replicas are alike."""

    num_parameters: int
    """Of the whole model; one that stages share counts once."""

    num_active: int
    """Those that a token passes: all but the experts it is not sent to."""

    bubble: float
    """The idle share of the busiest rank."""

    step_s: float | None
    """The predicted seconds from a step's first op to its last gradient; None without costs."""

    costs_from: str | None
    """The file that the prediction is made with."""

    missing: tuple[str, ...] = ()
    """Kinds of ops that the costs do not know and count as 0."""

    @property
    def tokens_per_step(self) -> int:
        """The tokens of a global batch."""
        return self.config.training.global_batch_size * self.config.training.seq_len

    def __str__(self) -> str:
        return "\n".join((*self._head(), "", *_table(self._rows()), "", *self._tail()))

    def _head(self) -> list[str]:
        plan, config = self.plan, self.config
        training, parallel = config.training, config.parallel
        per_rank = f", {plan.schedule.vpp} stages a rank" if plan.schedule.vpp > 1 else ""
        extra = [f"{' and '.join(parallel.recompute)} recomputed"] if parallel.recompute else []
        extra += ["saved tensors offloaded to the host"] if parallel.saved == "offload" else []
        extra += ["tokens by DeepEP (memory: as by all_to_all)"] if parallel.exchange == "deepep" else []
        return [
            f"model     {'|'.join(plan.rows)}  {_count(self.num_parameters)} parameters, "
            f"{_count(self.num_active)} active a token, {training.dtype}",
            f"ranks     pp {plan.pp} x dp {plan.dp} x ep {plan.ep} = {plan.pp * plan.num_replicas}",
            f"schedule  {', '.join((parallel.schedule + per_rank, *extra))}",
            f"step      {plan.num_microbatches} micro-batches of {training.micro_batch_size} x {training.seq_len} "
            f"tokens in each of {plan.num_replicas} pipelines: {self.tokens_per_step:,} tokens",
        ]

    def _rows(self) -> list[list[str]]:
        rows = [["rank", "stages", "layers", *_PARTS, "peak at"]]
        unit, scale = _unit(max(memory.total for memory in self.ranks))
        for memory in self.ranks:
            stages = self.plan.stages_of(memory.pp_rank).values()
            letters = [self.plan.rows[stage] for stage in stages]
            layers = sum(row.count(letter) for row in letters for letter in "dt")
            sizes = [f"{getattr(memory, part) / scale:.2f}" for part in _PARTS]
            named = " ".join(f"{stage}:{_short(row)}" for stage, row in zip(stages, letters, strict=True))
            rows.append([str(memory.pp_rank), named, str(layers), *sizes, memory.peak])
        rows[0][3] = f"{unit} parameters"
        return rows

    def _tail(self) -> list[str]:
        if self.step_s is None:
            return [
                f"bubble    {self.bubble:.1%}, if a layer's forward, dgrad and wgrad take 1 each and "
                "communication nothing",
                f"time      not known; a run with --logging.trace_every N writes {self.config.output}/{NAME}, which "
                "the next dry run reads, or give --costs FILE",
            ]
        lacking = f"; nothing known of {', '.join(self.missing)}" if self.missing else ""
        return [
            f"bubble    {self.bubble:.1%}",
            f"time      {self.step_s:.3g} s a step, {self.tokens_per_step / self.step_s:,.0f} tokens/s, without the "
            f"optimizer; with {self.costs_from}{lacking}",
        ]


def describe(config: TrainConfig) -> DryRun:
    """Describe a run. With `parallel.dp` None there is one copy of the pipelines.

    Raises:
        ValueError: sizes that do not fit each other, or a costs file that is not there.

    """
    parallel = config.parallel
    dp = parallel.dp if parallel.dp is not None else 1
    plan = ParallelPlan.of(config, parallel.pp * parallel.ep * dp)
    found = find_costs(config)
    run = RunMemory(config, plan, found[0] if found is not None else ORDER_COSTS)
    trace = simulate(run.program, found[0] if found is not None else UNIT_COSTS)
    num, active = _count_parameters(run)
    return DryRun(
        config=config,
        plan=plan,
        ranks=run.ranks,
        num_parameters=num,
        num_active=active,
        bubble=measure(trace).bubble,
        step_s=trace.clock.show(trace.makespan) * 1e-6 if found is not None else None,
        costs_from=found[1] if found is not None else None,
        missing=tuple(missing(run.program, found[0])) if found is not None else (),
    )


def _count_parameters(run: RunMemory) -> tuple[int, int]:
    """Return the number of the model's parameters, and of those that a token passes."""
    model, shared, layers = run.config.model, dict[str, ParameterShape](), 0
    experts = 0
    for row in run.plan.rows:
        for letter in row:
            for shape in run.model.blocks[letter].parameters:
                if shape.is_shared:
                    shared[shape.name] = shape
                elif shape.is_expert:
                    experts += shape.size * run.plan.ep
                else:
                    layers += shape.size
    rest = layers + sum(shape.size for shape in shared.values())
    active = experts * model.num_experts_per_tok // model.num_experts if model.num_experts else 0
    return rest + experts, rest + active


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of aligned columns; the first two and the last to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = (0, 1, len(widths) - 1)
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _short(row: str) -> str:
    """Return a row of blocks with repeats counted: Et*8.

    Example:
        >>> _short("Edddtt")
        'Ed*3tt'

    """
    text = ""
    for letter in dict.fromkeys(row):
        num = row.count(letter)
        text += letter * num if num < 3 else f"{letter}*{num}"
    return text


def _unit(most: int) -> tuple[str, int]:
    return ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)


def _count(number: int) -> str:
    for scale, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= scale:
            return f"{number / scale:.2f}{letter}"
    return f"{number:,}"
