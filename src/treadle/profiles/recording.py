"""A Recording: what the ranks of a run wrote down about their work, before it is matched with a schedule."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from treadle.ir.ops import OpKind
from treadle.ir.program import Bools, Bytes, Ints, Longs, Shorts

UNKNOWN = -1
"""Stands for a step, micro-batch, stage, chunk or rank that a file does not name."""


_COLUMNS = {
    "kind": np.uint8,
    "mb": np.int32,
    "stage": np.int16,
    "chunk": np.int16,
    "layer": np.int16,
    "step": np.int32,
    "joined": np.bool_,
    "start": np.int64,
    "end": np.int64,
}


class Mark(NamedTuple):
    """One piece of work as a reader found it. Times are nanoseconds of the rank's own clock."""

    kind: OpKind
    start: int
    end: int
    mb: int = UNKNOWN
    stage: int = UNKNOWN
    chunk: int = UNKNOWN
    layer: int = 0
    step: int = UNKNOWN
    joined: bool = False


class MarkColumns:
    """Marks as they come, 40 bytes each."""

    def __init__(self) -> None:
        types = {name: np.dtype(dtype).char.replace("?", "B") for name, dtype in _COLUMNS.items()}
        self._columns: dict[str, array[int]] = {name: array(char) for name, char in types.items()}
        self._append = [self._columns[name].append for name in Mark._fields]

    @classmethod
    def of(cls, marks: Iterable[Mark]) -> MarkColumns:
        """All of these."""
        made = cls()
        for mark in marks:
            made.append(mark)
        return made

    def append(self, mark: Mark) -> None:
        """Add a mark after the others."""
        for append, value in zip(self._append, mark, strict=True):
            append(value)

    def column(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """One field of all marks."""
        return np.frombuffer(self._columns[name], _COLUMNS[name]).copy()


@dataclass(frozen=True, eq=False)
class RankRecording:
    """The marks of one rank in columns, in the order in which they started.

    `stage` counts over the whole pipeline, `chunk` over the rank: a file names one of them, or none. `joined` marks the
    second op of an overlapped pair. `clock` names the clock of the times: ranks of one clock need no alignment.
    """

    source: str
    rank: int
    pp: int
    dp: int
    clock: str
    kind: Bytes
    mb: Ints
    stage: Shorts
    chunk: Shorts
    layer: Shorts
    step: Ints
    joined: Bools
    start: Longs
    end: Longs

    @classmethod
    def of(
        cls,
        marks: Iterable[Mark],
        *,
        source: str,
        clock: str,
        rank: int = UNKNOWN,
        pp: int = UNKNOWN,
        dp: int = UNKNOWN,
    ) -> RankRecording:
        """Make the columns of a rank's marks, sorted by start."""
        return cls.joined_of([MarkColumns.of(marks)], source=source, clock=clock, rank=rank, pp=pp, dp=dp)

    @classmethod
    def joined_of(
        cls,
        parts: Sequence[MarkColumns],
        *,
        source: str,
        clock: str,
        rank: int = UNKNOWN,
        pp: int = UNKNOWN,
        dp: int = UNKNOWN,
    ) -> RankRecording:
        """Put columns together, sorted by start; of marks that start and end together the first comes first."""
        whole = {name: np.concatenate([part.column(name) for part in parts]) for name in _COLUMNS}
        order = np.lexsort((whole["end"], whole["start"]))
        columns: dict[str, Any] = {name: column[order] for name, column in whole.items()}
        return cls(source=source, clock=clock, rank=rank, pp=pp, dp=dp, **columns)

    def __len__(self) -> int:
        return len(self.kind)

    def without_copies(self) -> RankRecording:
        """Leave out marks of a micro-batch that are the same as another in every column."""
        table = np.stack([getattr(self, name).astype(np.int64) for name in _COLUMNS])
        first = np.unique(table, axis=1, return_index=True)[1]
        kept = np.isin(np.arange(len(self)), first) | (self.mb == UNKNOWN)
        return self if kept.all() else replace(self, **{name: getattr(self, name)[kept] for name in _COLUMNS})


class Remark(NamedTuple):
    """Something that was not as expected, or could not be read: a sentence, how often, and where."""

    what: str
    source: str = ""
    times: int = 1

    def __str__(self) -> str:
        where = f"{self.source}: " if self.source else ""
        often = f" ({self.times:,} times)" if self.times > 1 else ""
        return f"{where}{self.what}{often}"


@dataclass(frozen=True, eq=False)
class Recording:
    """What a reader found in the files of one run.

    `pp`, `vpp`, `dp` and `num_mb` are sizes that the files name themselves, or None. `late_receives` says that the
    trainer posts a receive when the computation before it has ended, as Megatron does; `waits_inside` that the mark of
    a computation includes its wait for the message. `remarks` are what the reader
    could not use, never dropped in silence.
    """

    form: str
    ranks: tuple[RankRecording, ...]
    pp: int | None = None
    vpp: int | None = None
    dp: int | None = None
    num_mb: int | None = None
    late_receives: bool = False
    waits_inside: bool = False
    remarks: tuple[Remark, ...] = ()
