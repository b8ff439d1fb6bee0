"""Nsight Systems' SQLite export: named ranges, and when the device did what was launched in them.

    NVTX_EVENTS                    start, end, text or textId, globalTid       ranges of the host
    StringIds                      id, value                                   names
    CUPTI_ACTIVITY_KIND_RUNTIME    start, globalTid, correlationId             launches
    CUPTI_ACTIVITY_KIND_KERNEL     start, end, globalPid, correlationId        what they launched
    TARGET_INFO_SESSION_START_TIME utcEpochNs                                  where the times begin

Tables and columns are those of NVIDIA's documentation of the export. Rows are read one after the other: nothing is held
but the ranges that are asked for.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from treadle.ir.program import Bools, Longs

_ROWS = 100_000
_TID_BITS = 24
"""A globalTid is a process, and a thread in its last bits."""
_ABSENT = np.iinfo(np.int64).max


class Range(NamedTuple):
    """A range of the host: its name, nanoseconds, process and thread."""

    name: str
    start: int
    end: int
    process: int
    thread: int


@dataclass(frozen=True, eq=False)
class Launched:
    """What intervals of the host launched, an entry each, in nanoseconds; `start` is above `end` where nothing was.

    `start` and `end` are of the device's computation, `nccl_start` and `nccl_end` of its communication; `handed_over`
    is the first launch by another thread than the interval's. `device` is the number of the last device used, or -1.
    """

    start: Longs
    end: Longs
    nccl_start: Longs
    nccl_end: Longs
    handed_over: Longs
    device: int

    @property
    def computes(self) -> Bools:
        """`[interval]`: has it launched computation."""
        return self.start < self.end

    @property
    def communicates(self) -> Bools:
        """`[interval]`: has it launched communication."""
        return self.nccl_start < self.nccl_end


class NsysFile:
    """An export that is open for reading."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path, self.connection = path, connection
        self.columns = {
            table: {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        }
        self._require("NVTX_EVENTS", "start", "end", "globalTid")

    @property
    def has_device(self) -> bool:
        """True if launches and kernels were recorded."""
        return {"CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"} <= self.columns.keys()

    @property
    def begins_at(self) -> int | None:
        """Nanoseconds since 1970 at which the times of the file begin, if it says so."""
        if "utcEpochNs" not in self.columns.get("TARGET_INFO_SESSION_START_TIME", ()):
            return None
        row = self.connection.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
        return int(row[0]) if row else None

    def ranges(self, wanted: Callable[[str], bool]) -> list[Range]:
        """The ranges with a wanted name that have ended, in order of start."""
        names: dict[int, str] = {}
        if "value" in self.columns.get("StringIds", ()):
            for number, name in self.connection.execute("SELECT id, value FROM StringIds"):
                if wanted(name):
                    names[number] = name
        text = "text" if "text" in self.columns["NVTX_EVENTS"] else "NULL"
        text_id = "textId" if "textId" in self.columns["NVTX_EVENTS"] else "NULL"
        query = f"SELECT start, end, {text}, {text_id}, globalTid FROM NVTX_EVENTS WHERE end > start"
        found = []
        for start, end, said, number, tid in self.connection.execute(query):
            name = said if said else names.get(number)
            if name is not None and (not said or wanted(name)):
                found.append(Range(name, start, end, tid >> _TID_BITS, tid))
        return sorted(found, key=lambda each: (each.start, -each.end))

    def launched(self, process: int, thread: int, start: Sequence[int], end: Sequence[int]) -> Launched:
        """Find what intervals of a thread launched; they are in order and do not overlap."""
        least = [np.full(len(start), _ABSENT) for _ in range(3)]
        most = [np.full(len(start), -_ABSENT) for _ in range(2)]
        device = -1
        begin, stop = np.array(start, np.int64), np.array(end, np.int64)
        for launch, tid, first, last, nccl, number in self._kernels(process):
            at = np.searchsorted(begin, launch, side="right") - 1
            inside = (at >= 0) & (launch < stop[np.maximum(at, 0)])
            device = int(number[-1])
            for which, chosen in ((0, inside & ~nccl), (1, inside & nccl)):
                np.minimum.at(least[which], at[chosen], first[chosen])
                np.maximum.at(most[which], at[chosen], last[chosen])
            other = inside & ~nccl & (tid != thread)
            np.minimum.at(least[2], at[other], launch[other])
        return Launched(least[0], most[0], least[1], most[1], least[2], device)

    def _kernels(self, process: int) -> Iterator[tuple[Longs, Longs, Longs, Longs, Bools, Longs]]:
        """Launch, its thread, start, end, is it NCCL's, and the device, of a process's kernels, piece by piece."""
        self._require("CUPTI_ACTIVITY_KIND_RUNTIME", "start", "globalTid", "correlationId")
        self._require("CUPTI_ACTIVITY_KIND_KERNEL", "start", "end", "correlationId")
        kernels = self.columns["CUPTI_ACTIVITY_KIND_KERNEL"]
        name = next((column for column in ("shortName", "demangledName") if column in kernels), None)
        nccl = self._nccl_names() if name is not None else set()
        own = f"AND k.globalPid >> {_TID_BITS} = r.globalTid >> {_TID_BITS}" if "globalPid" in kernels else ""
        rows = self.connection.execute(
            f"SELECT r.start, r.globalTid, k.start, k.end, {f'k.{name}' if name else 'NULL'}, "
            f"{'k.deviceId' if 'deviceId' in kernels else '-1'} "
            "FROM CUPTI_ACTIVITY_KIND_RUNTIME r JOIN CUPTI_ACTIVITY_KIND_KERNEL k "
            f"ON k.correlationId = r.correlationId {own} WHERE r.globalTid >> {_TID_BITS} = ?",
            (process,),
        )
        while piece := rows.fetchmany(_ROWS):
            launch, tid, start, end, names, device = zip(*piece, strict=True)
            columns = (np.array(column, np.int64) for column in (launch, tid, start, end, device))
            one, two, three, four, five = columns
            yield one, two, three, four, np.array([each in nccl for each in names]), five

    def _nccl_names(self) -> set[int]:
        query = "SELECT id FROM StringIds WHERE value LIKE '%nccl%' OR value LIKE '%rccl%'"
        return {number for (number,) in self.connection.execute(query)}

    def _require(self, table: str, *columns: str) -> None:
        lacking = set(columns) - self.columns.get(table, set())
        if lacking:
            raise ValueError(
                f"{self.path}: an export of Nsight Systems has {', '.join(columns)} in the table {table}, and here "
                f"{', '.join(sorted(lacking))} is missing; record with 'nsys profile -t cuda,nvtx' and export with "
                "'nsys export --type sqlite'"
            )


@contextmanager
def open_nsys(path: Path) -> Iterator[NsysFile]:
    """Open an export for reading; a ValueError names a file that is damaged or something else."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            yield NsysFile(path, connection)
    except sqlite3.Error as error:
        raise ValueError(f"{path}: cannot be read as a SQLite database: {error}; export it again") from error
