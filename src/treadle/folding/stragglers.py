"""How much longer a step takes when some GPUs are slow: many draws of which ones, for several schedules.

A step's time alone needs less than the end of every rank. Time grows with slowness, so a column that is slow on a
subset of the ranks on which another one of its replica is slow decides nothing, and is left out; a column at full speed
always is. Replicas that are alike in all draws of a schedule are simulated once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from treadle.costs import Costs
from treadle.folding.folding import MeshSize
from treadle.folding.replicas import BodyTimes, Members, Replicas, factors_of, together
from treadle.ir.program import Longs, Program
from treadle.ir.trace import Clock
from treadle.simulator.slowness import Stragglers

if TYPE_CHECKING:
    from treadle.folding.printed_stragglers import StragglerRowJson, StragglersJson

Progress: TypeAlias = Callable[[int, int], None]
"""Called after each piece of work: `progress(done, total)`."""

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
"""Of the draws' slowdowns: those that are shown."""


@dataclass(frozen=True, eq=False)
class StragglerRow:
    """A schedule's steps: `base` without stragglers and `makespans[draw]` with them, in ticks of the clock."""

    name: str
    base: int
    makespans: Longs
    clock: Clock

    @property
    def median(self) -> float:
        """The median step with stragglers, in ticks."""
        return float(np.median(self.makespans))

    def slowdown(self, quantile: float) -> float:
        """Return how much longer a step takes than without stragglers; at most so in a share `quantile` of the draws.

        0.1 is 10 % longer.
        """
        return float(np.quantile(self.makespans, quantile)) / self.base - 1 if self.base else 0.0

    def as_dict(self) -> StragglerRowJson:
        """Return a dict for JSON: a step without and a median one with stragglers, in seconds, and slowdowns.

        Where the clock has no real unit, a unit stands for a second.
        """
        second = self.clock.ticks * {"us": 1_000_000, "ms": 1000}.get(self.clock.unit, 1)
        return {
            "name": self.name,
            "step_s": self.base / second,
            "median_s": self.median / second,
            "p10": self.slowdown(QUANTILES["p10"]),
            "p50": self.slowdown(QUANTILES["p50"]),
            "p90": self.slowdown(QUANTILES["p90"]),
            "max": self.slowdown(QUANTILES["max"]),
        }


@dataclass(frozen=True)
class StragglerStudy:
    """The same draws of slow GPUs under several schedules."""

    stragglers: Stragglers
    num_ranks: int
    num_draws: int
    rows: tuple[StragglerRow, ...]

    @property
    def least_slowed(self) -> StragglerRow:
        """The schedule with the lowest median slowdown; of equal ones that with the lowest p90."""
        return min(self.rows, key=lambda row: (row.slowdown(0.5), row.slowdown(0.9)))

    @property
    def fastest(self) -> StragglerRow:
        """The schedule with the shortest median step under stragglers."""
        return min(self.rows, key=lambda row: row.median)

    def as_dict(self) -> StragglersJson:
        """Return a dict for JSON."""
        return {
            "share": self.stragglers.share,
            "factor": self.stragglers.factor,
            "ranks": self.num_ranks,
            "draws": self.num_draws,
            "least_slowed": self.least_slowed.name,
            "fastest": self.fastest.name,
            "rows": [row.as_dict() for row in self.rows],
        }


_FEW = Stragglers()


def straggler_study(
    pipelines: Mapping[str, Program],
    costs: Costs | Mapping[str, Costs],
    *,
    ep: int,
    dp: int,
    gpus_per_rank: int = 1,
    stragglers: Stragglers = _FEW,
    draws: int = 200,
    seed: int = 0,
    progress: Progress | None = None,
) -> StragglerStudy:
    """Draw many times which GPUs of a mesh are slow, and simulate a step of each schedule with every draw.

    Args:
        pipelines: by name of a schedule, its Program for one pipeline, lowered without `every_gpu`.
        costs: how long ops take; or that for each schedule, where stages differ.
        ep: columns of an expert group.
        dp: expert groups.
        gpus_per_rank: GPUs that wait for each other in every layer, as those of a tensor-parallel group do: a rank is
            slow if any of them is.
        stragglers: how many GPUs are slow, and how slow.
        draws: how often; every schedule has the same draws.
        seed: of the draws.
        progress: called with how many simulations are done, and of how many.

    Returns:
        The step of every draw, for each schedule in the order given.

    Raises:
        ValueError: a pipeline cannot be folded (`fold` says why), pipelines differ in their ranks, or there is
            nothing to do.

    Example:
        >>> costs = treadle.load_costs("deepseek-v3-h800")
        >>> options = treadle.LoweringOptions(layers=1, moe=True, ep=4, dp=8)
        >>> names = ("1f1b", "zb-h1")
        >>> schedules = {name: treadle.generate(name, pp=4, microbatches=8) for name in names}
        >>> pipelines = {name: treadle.lower(schedule, costs, options) for name, schedule in schedules.items()}
        >>> study = straggler_study(pipelines, costs, ep=4, dp=8, stragglers=Stragglers(0.02, 1.5), draws=5)
        >>> study.num_ranks, [row.name for row in study.rows if 0 < row.slowdown(1.0) <= 0.5]
        (128, ['1f1b', 'zb-h1'])

    """
    sizes = {program.num_ranks for program in pipelines.values()}
    if len(sizes) != 1 or draws < 1:
        listed = ", ".join(f"{name} {program.num_ranks}" for name, program in pipelines.items())
        raise ValueError(
            f"a study takes one or more draws and pipelines with the same number of ranks, got {draws} draws and "
            f"ranks {listed or 'of none'}"
        )
    mesh = MeshSize(ep, dp)
    num_gpus = sizes.pop() * mesh.num_columns * gpus_per_rank
    slow = [np.unique(stragglers.ranks(num_gpus, (seed, draw)) // gpus_per_rank) for draw in range(draws)]
    of_name = dict.fromkeys(pipelines, costs) if isinstance(costs, Costs) else costs
    studies = [
        _Study(name, Replicas(program, of_name[name]), mesh, stragglers.factor, slow)
        for name, program in pipelines.items()
    ]
    total, done = sum(len(study.different) for study in studies), 0

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    rows = [study.run(advance) for study in studies]
    return StragglerStudy(stragglers, num_gpus, draws, tuple(rows))


class _Study:
    """The draws under one schedule."""

    def __init__(self, name: str, replicas: Replicas, mesh: MeshSize, factor: float, slow: list[Longs]) -> None:
        self._name = name
        self._replicas = replicas
        self._full_speed: Members = ((1.0,) * replicas.program.num_ranks,)
        self._of_draw = [self._deciding(ranks, mesh, factor) for ranks in slow]
        found = {self._full_speed}.union(*self._of_draw)
        self.different = sorted(found, key=lambda members: (len(members), members))
        """The replicas of all draws, small ones first."""

    def run(self, advance: Callable[[], None]) -> StragglerRow:
        """Simulate each different replica, then the end of the step for each draw."""
        bodies: dict[Members, BodyTimes] = {}
        for members in self.different:
            bodies[members] = self._replicas.body(members)
            advance()
        makespans = [self._makespan(bodies, replicas) for replicas in self._of_draw]
        base = self._makespan(bodies, {self._full_speed})
        return StragglerRow(self._name, base, np.array(makespans, np.int64), self._replicas.costs.clock)

    def _deciding(self, slow: Longs, mesh: MeshSize, factor: float) -> set[Members]:
        """Return the different replicas of a draw, each with the columns that decide its times."""
        num_pp, size = self._replicas.program.num_ranks, mesh.ep if self._replicas.meets else 1
        of_column: dict[int, set[int]] = defaultdict(set)
        for rank, column in zip(*(part.tolist() for part in np.divmod(slow, mesh.num_columns)), strict=True):
            of_column[column].add(rank)
        of_replica: dict[int, list[set[int]]] = defaultdict(list)
        for column, ranks in of_column.items():
            of_replica[column // size].append(ranks)
        found = {self._full_speed} if len(of_replica) < mesh.num_columns // size else set()
        for columns in of_replica.values():
            kept = {tuple(sorted(ranks)) for ranks in columns if not any(ranks < other for other in columns)}
            found.add(tuple(tuple(factor if r in ranks else 1.0 for r in range(num_pp)) for ranks in sorted(kept)))
        return found

    def _makespan(self, bodies: Mapping[Members, BodyTimes], replicas: Collection[Members]) -> int:
        body, tail = together([bodies[members] for members in replicas]), self._replicas.tail
        times = tail.run(body.ready, factors_of([*replicas]))
        return int(tail.ends(body.done, times).max())
