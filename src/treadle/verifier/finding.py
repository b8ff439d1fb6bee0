"""Findings: what the verifier objects to. Each has a code that `treadle explain` tells more about."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.ir.program import Op
from treadle.ir.show import peak_object, show_held

if TYPE_CHECKING:
    from treadle.verifier.printed_report import FindingJson, VerifyJson

MOST = 1000
"""Findings of one code past this many say nothing new: they are not looked for, and the report says so."""


@dataclass(frozen=True)
class Finding:
    """One objection: a code, where, a sentence, and a witness that a person can follow.

    `cell` is the place in the rank's row, `op` the index in the program, each None where there is no single one.
    `steps` is the witness: for a deadlock the chain of ops that wait for each other, one a line.

    Example:
        >>> str(Finding("T101", 0, None, "F0.0 of stage 0 is missing"))
        'T101 rank 0: F0.0 of stage 0 is missing'

    """

    code: str
    rank: int
    cell: int | None
    message: str
    steps: tuple[str, ...] = ()
    op: int | None = None

    @classmethod
    def at(cls, code: str, op: Op, message: str, steps: tuple[str, ...] = ()) -> Finding:
        """A finding about an op of a program."""
        return cls(code, op.lane.rank, op.cell if op.cell >= 0 else None, message, steps, op.index)

    def __str__(self) -> str:
        return f"{self.code} rank {self.rank}: {self.message}"

    def as_dict(self) -> FindingJson:
        """Return a dict for JSON."""
        return {
            "code": self.code,
            "rank": self.rank,
            "cell": self.cell,
            "op": self.op,
            "message": self.message,
            "steps": list(self.steps),
        }


def worst_first(findings: list[Finding]) -> tuple[Finding, ...]:
    """One of each code before the second of any, a deadlock first: what a person should see in the first lines."""
    seen: dict[str, int] = {}
    ranked = []
    for finding in findings:
        nth = seen[finding.code] = seen.get(finding.code, -1) + 1
        ranked.append((nth, finding.code != "T201", finding))
    return tuple(finding for *_, finding in sorted(ranked, key=lambda entry: entry[:2]))


def more_of(code: str) -> str:
    """Return the line of a report about a code whose findings it may not list all."""
    return f"{code}: past {MOST:,} findings no more were looked for"


@dataclass(frozen=True)
class VerifyReport:
    """All findings about a schedule or a program; `findings` is empty if there is nothing to object to.

    Peaks are counted a rank: for a schedule in activations of (mb, chunk), for a program in `peak_unit` (bytes; layers,
    each of a micro-batch, or activations where the costs it was lowered with do not say bytes).

    Example:
        >>> report = treadle.verify(treadle.generate("1f1b", pp=2, microbatches=2))
        >>> report.clean, report.peak_activations
        (True, (2, 1))

    """

    num_ranks: int
    num_cells: int
    num_ops: int
    findings: tuple[Finding, ...]
    peak_activations: tuple[int, ...] = ()
    peaks: tuple[float, ...] = ()
    peak_unit: str = "bytes"

    @property
    def cut(self) -> tuple[str, ...]:
        """The codes with so many findings that there may be more than are listed."""
        counts = Counter(finding.code for finding in self.findings)
        return tuple(code for code, count in counts.items() if count >= MOST)

    @property
    def clean(self) -> bool:
        """True if there are no findings."""
        return not self.findings

    def __str__(self) -> str:
        if self.findings:
            told = ["\n    ".join([str(finding), *finding.steps]) for finding in self.findings]
            return "\n".join([*told, *map(more_of, self.cut)])
        if self.peaks:
            peak = show_held(max(self.peaks), self.peak_unit)
            return f"clean: {self.num_ranks} ranks, {self.num_ops} ops, peak {peak}"
        most = max(self.peak_activations, default=0)
        return f"clean: {self.num_ranks} ranks, {self.num_cells} cells, peak {most} activations"

    def as_dict(self) -> VerifyJson:
        """Return a dict for JSON."""
        return {
            "clean": self.clean,
            "num_ranks": self.num_ranks,
            "num_cells": self.num_cells,
            "num_ops": self.num_ops,
            "peak_activations": list(self.peak_activations),
            "peak": peak_object(self.peaks, self.peak_unit) if self.peaks else None,
            "cut": list(self.cut),
            "findings": [finding.as_dict() for finding in self.findings],
        }
