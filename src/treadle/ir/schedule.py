"""A Schedule: for each rank its cells in order, with the Placement of the chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias, cast

from treadle.ir.action import Action, Cell, Kind, Pair
from treadle.ir.notebook_forms import ShownInNotebooks
from treadle.ir.placement import Placement
from treadle.ir.turn import Turn

Channel: TypeAlias = tuple[int, int]
"""An ordered pair of ranks: what the first sends, the second receives."""

Row: TypeAlias = tuple[Cell, ...]


MAGIC = "# treadle-schedule 1"
"""The first line of the text form, with its version."""

MOST_MICROBATCHES = 1_000_000
"""Micro-batches in a step; a larger number is taken for a typing error."""

MOST_FORWARDS = 100_000_000
"""Forwards over all ranks; more do not fit into memory."""

if TYPE_CHECKING:  # numpy is imported where it is used: to write, read and show a schedule takes none
    import numpy as np
    import numpy.typing as npt

    _Ints: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Actions:
    """The actions of a schedule in columns, rank by rank in row order; what array work reads.

    `cell` is the place in the rank's row; `joined` marks the backward of a pair. An action that the schedule
    has no place for (its chunk or its micro-batch is too high) has stage -1.
    """

    kind: _Ints
    mb: _Ints
    chunk: _Ints
    rank: _Ints
    cell: _Ints
    joined: npt.NDArray[np.bool_]
    stage: _Ints
    pipe: _Ints

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True)
class Schedule(ShownInNotebooks):
    """The cells that each rank computes, in order.

    Messages follow from the rows: what an action makes for another rank is sent when it is made, and
    received in the sender's order. `receives` lists another order for a channel, message by message; a
    message is named by the action that reads it (F3.1, or B3.1 for the gradient that B or I reads). `issue` is the
    order in which each rank's host issues its cells and messages, where that is given: a row of turns for each rank.

    Raises:
        ValueError: rows and placement do not fit each other.

    Example:
        >>> rows = ((F(0), B(0)), (F(0), B(0)))
        >>> Schedule("mine", Placement.loop(2, 1), 1, rows).num_cells
        4

    """

    name: str
    placement: Placement
    num_microbatches: int
    rows: tuple[Row, ...]
    receives: Mapping[Channel, tuple[Action, ...]] = field(default_factory=dict)
    issue: tuple[tuple[Turn, ...], ...] = ()

    def __hash__(self) -> int:
        """Hash what is hashable; schedules that differ in `receives` alone share a hash."""
        return hash((self.name, self.placement, self.num_microbatches, self.rows, self.issue))

    def __post_init__(self) -> None:
        if not self.name.isprintable():
            raise ValueError(f"a schedule's name is one line of printable text, got {self.name!r}")
        if not 1 <= self.num_microbatches <= MOST_MICROBATCHES:
            raise ValueError(f"a step has 1 to {MOST_MICROBATCHES} micro-batches, got {self.num_microbatches}")
        if self.pp * self.vpp * self.num_microbatches > MOST_FORWARDS:
            size = f"{self.pp} ranks, {self.vpp} chunks and {self.num_microbatches} micro-batches"
            raise ValueError(f"a schedule has at most {MOST_FORWARDS} forwards, got {size}")
        if len(self.rows) != self.placement.pp:
            raise ValueError(
                f"a schedule has a row for each of its {self.placement.pp} ranks, got {len(self.rows)} rows"
            )
        for (src, dst), labels in self.receives.items():
            if not (0 <= src < self.pp and 0 <= dst < self.pp and src != dst):
                raise ValueError(f"no channel {src}>{dst} between {self.pp} ranks")
            if any(label.kind not in (Kind.F, Kind.B) for label in labels):
                raise ValueError(f"messages on channel {src}>{dst} are named F or B, got {' '.join(map(str, labels))}")
        self._check_issue()
        if self.num_microbatches % self.placement.num_pipes:
            raise ValueError(
                f"{self.placement.num_pipes} pipes share the micro-batches equally, "
                f"got {self.num_microbatches}; use {self.num_microbatches + 1}"
            )

    def _check_issue(self) -> None:
        if self.issue and len(self.issue) != self.pp:
            raise ValueError(f"an order of issue has a row for each of {self.pp} ranks, got {len(self.issue)}")
        for rank, turns in enumerate(self.issue):
            for turn in set(turns):
                if turn.verb != "." and (turn.peer == rank or not 0 <= turn.peer < self.pp):
                    raise ValueError(
                        f"rank {rank} issues {turn}, and its peers are the others of ranks 0 to {self.pp - 1}"
                    )
            if turns and turns[0].joined:
                raise ValueError(
                    f"rank {rank} begins with {turns[0]}, which joins the turn before it; leave out the '+'"
                )
            cells = sum(turn.verb == "." for turn in turns)
            if cells != len(self.rows[rank]):
                raise ValueError(f"rank {rank} issues {cells} cells, and its row has {len(self.rows[rank])}")

    def __str__(self) -> str:
        """Return the text form, which `treadle.loads` and every command read (`treadle.ir.text` describes it)."""
        return "\n".join([*self._header_lines(), *self.row_lines()])

    def _header_lines(self) -> Iterator[str]:
        yield MAGIC
        yield f"# name: {self.name}"
        yield f"# placement: {self.placement.name}"
        yield f"# pp: {self.pp}"
        yield f"# vpp: {self.vpp}"
        yield f"# microbatches: {self.num_microbatches}"
        for (src, dst), labels in sorted(self.receives.items()):
            yield f"# receive {src}>{dst}: {' '.join(map(str, labels))}".rstrip()
        for rank, turns in enumerate(self.issue):
            yield f"# issue {rank}: {' '.join(map(str, turns))}".rstrip()

    def row_lines(self) -> list[str]:
        """Return the rows of the text form: `0: F0.0 B0.0`."""
        return [f"{rank}: {' '.join(map(str, row))}".rstrip() for rank, row in enumerate(self.rows)]

    @property
    def pp(self) -> int:
        """Number of ranks."""
        return self.placement.pp

    @property
    def vpp(self) -> int:
        """Number of chunks on each rank."""
        return self.placement.vpp

    @property
    def microbatches_per_pipe(self) -> int:
        """Micro-batches are numbered from 0 in each pipe."""
        return self.num_microbatches // self.placement.num_pipes

    @property
    def num_cells(self) -> int:
        """Cells over all ranks; an overlapped pair is one."""
        return sum(map(len, self.rows))

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the actions of a rank in order; a pair's forward before its backward."""
        for cell in self.rows[rank]:
            yield from cell.actions

    @cached_property
    def columns(self) -> Actions:
        """The rows as arrays, made once."""
        import numpy as np

        num_actions = [_actions_in(row) for row in self.rows]
        per_cell = np.concatenate(num_actions)
        flat = chain.from_iterable(chain.from_iterable(map(_flat, self.rows, num_actions)))
        kind, mb, chunk = np.fromiter(flat, np.int32, 3 * int(per_cell.sum())).reshape(-1, 3).T.copy()
        rank = np.repeat(np.arange(self.pp, dtype=np.int32), [n.sum() for n in num_actions])
        cells = np.concatenate([np.arange(len(row), dtype=np.int32) for row in self.rows])
        cell = np.repeat(cells, per_cell)
        joined = np.ones(len(kind), bool)
        joined[np.cumsum(per_cell) - per_cell] = False
        known = (chunk >= 0) & (mb >= 0) & (chunk < self.vpp) & (mb < self.microbatches_per_pipe)
        safe = np.where(known, chunk, 0)
        stage = np.where(known, np.array(self.placement.stages, np.int32)[rank, safe], -1).astype(np.int32)
        pipe = np.array(self.placement.pipes, np.int32)[safe]
        return Actions(kind, mb, chunk, rank, cell, joined, stage, pipe)


def _actions_in(row: Row) -> _Ints:
    """Count the actions of each cell. An Action is a tuple of 3, a Pair one of 2, and `len` is quick to ask."""
    import numpy as np

    lengths = np.fromiter(map(len, row), np.int32, len(row))
    return np.where(lengths == len(Pair._fields), 2, 1).astype(np.int32)


def _flat(row: Row, num_actions: _Ints) -> Iterable[Iterable[int]]:
    """Return the actions of a row. One without pairs is that already."""
    if num_actions.max(initial=1) == 1:
        return cast(Iterable[Action], row)
    return [action for cell in row for action in cell.actions]
