"""What a schedule declares about itself, and the sizes it can do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from treadle.ir import Cell, Placement, Schedule
from treadle.ir.placement import MOST_CHUNKS
from treadle.ir.schedule import MOST_FORWARDS, MOST_MICROBATCHES

MOST_RANKS = 65_536
"""Ranks of a pipeline; a larger number is taken for a typing error."""


@dataclass(frozen=True)
class Size:
    """P ranks, V chunks on each, M micro-batches in a step."""

    pp: int
    vpp: int
    microbatches: int

    def __str__(self) -> str:
        return f"pp={self.pp} vpp={self.vpp} microbatches={self.microbatches}"


@dataclass(frozen=True)
class Family:
    """A schedule for any size: its row of cells for each rank, and what is known about it.

    `row(size, rank)` yields the rank's cells in order. `refuse(size)` says why a size cannot be done, or
    nothing. `vpps` are the chunk counts it takes, the first one the default; an empty tuple means any, 2
    by default. The texts use P, V, M, r for the sizes and F, I, W, B=I+W, FB for the times of a cell. `bubble`
    begins with a formula: what the rank that idles least idles. A test evaluates it.

    `trainers`, `overlapped`, `regular` and `searched` are what `treadle plan` asks a schedule.
    """

    name: str
    summary: str
    source: str
    placement: Callable[[int, int], Placement]
    row: Callable[[Size, int], Iterator[Cell]]
    refuse: Callable[[Size], str | None]
    vpps: tuple[int, ...]
    demands: str
    bubble: str
    memory: str
    trainers: tuple[str, ...] = ()
    """Public trainers that run it (Megatron-LM, torch.distributed.pipelining), each with the name it has there. A plan
    considers a schedule without one only where it is named."""

    overlapped: bool = False
    """Cells run the forward of one micro-batch beside the backward of another, which hides the expert all-to-all. A
    plan considers it for models with experts."""

    regular: bool = True
    """From 2P micro-batches on, each further P of them lengthen the step by the same time where stages are alike."""

    searched: bool = True
    """A plan considers it where no schedule is named. False: another one is never slower or larger."""

    @property
    def default_vpp(self) -> int:
        """Chunks a rank where the user gives none."""
        return self.vpps[0] if self.vpps else 2

    def size(self, pp: int, vpp: int | None, microbatches: int) -> Size:
        """The size asked for, or a ValueError with the reason and the nearest size that can be done."""
        size = Size(pp, vpp if vpp is not None else self.default_vpp, microbatches)
        reason = self._why_not(size)
        if reason is not None:
            nearest = self.nearest(size)
            wayout = f"the nearest size it can do is {nearest}" if nearest else f"it needs {self.demands}"
            raise ValueError(f"{self.name} {reason}, got {size}; {wayout}")
        return size

    def generate(self, size: Size, progress: Callable[[int, int], None] | None = None) -> Schedule:
        """The schedule of this size, row by row; `progress(rows done, rows)` is called after each."""
        rows = []
        for rank in range(size.pp):
            rows.append(tuple(self.row(size, rank)))
            if progress is not None:
                progress(rank + 1, size.pp)
        return Schedule(self.name, self.placement(size.pp, size.vpp), size.microbatches, tuple(rows))

    def nearest(self, size: Size) -> Size | None:
        """The closest size that can be done: least relative change, then the larger."""
        asked = Size(
            min(MOST_RANKS, max(1, size.pp)), max(1, size.vpp), min(MOST_MICROBATCHES, max(1, size.microbatches))
        )

        def distance(other: Size) -> tuple[float, int]:
            changes = (
                abs(other.pp - asked.pp) / asked.pp,
                abs(other.vpp - asked.vpp) / asked.vpp,
                abs(other.microbatches - asked.microbatches) / asked.microbatches,
            )
            return sum(changes), -(other.pp + other.vpp + other.microbatches)

        def closest(pps: Iterable[int]) -> Size | None:
            best: Size | None = None
            for pp in pps:
                for vpp in sorted(self.vpps or range(1, min(asked.vpp, MOST_CHUNKS) + 1), key=lambda n: -n):
                    least = distance(Size(pp, vpp, asked.microbatches))
                    if best is not None and least[0] > distance(best)[0]:
                        continue
                    done = self._nearest_microbatches(Size(pp, vpp, asked.microbatches))
                    if done is not None and (best is None or distance(done) < distance(best)):
                        best = done
            return best

        # A cluster is what it is: another number of ranks only where no number of micro-batches helps.
        return closest([asked.pp]) or closest(range(max(1, asked.pp - 4), asked.pp + 5))

    def _nearest_microbatches(self, size: Size) -> Size | None:
        """Return the size with the nearest number of micro-batches that can be done; ranks and chunks stay."""
        most = max(1, min(size.microbatches, MOST_FORWARDS // (size.pp * size.vpp)))
        for delta in range(2 * size.pp + 2):
            for num_mb in (most + delta, most - delta):
                closest = Size(size.pp, size.vpp, num_mb)
                if self._why_not(closest) is None:
                    return closest
        return None

    def _why_not(self, size: Size) -> str | None:
        for value, what in (
            (size.pp, "ranks"),
            (size.vpp, "chunks a rank"),
            (size.microbatches, "micro-batches"),
        ):
            if value < 1:
                return f"needs at least 1 of its {what}"
        most = ((size.pp, MOST_RANKS, "ranks"), (size.vpp, MOST_CHUNKS, "chunks a rank"))
        for value, limit, what in (*most, (size.microbatches, MOST_MICROBATCHES, "micro-batches")):
            if value > limit:
                return f"does at most {limit} {what}"
        if size.pp * size.vpp * size.microbatches > MOST_FORWARDS:
            return f"does at most {MOST_FORWARDS} forwards in all"
        if self.vpps and size.vpp not in self.vpps:
            wayout = "" if self.vpps != (1,) else " ('interleaved' takes more)"
            return f"puts {' or '.join(map(str, self.vpps))} {_chunks(self.vpps)} on each rank{wayout}"
        return self.refuse(size)


def _chunks(vpps: tuple[int, ...]) -> str:
    return "stage" if vpps == (1,) else "stages"


def any_size(size: Size) -> str | None:
    """A `refuse` for schedules that do every size."""
    del size
    return None
