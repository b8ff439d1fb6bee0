"""Findings: what the verifier objects to. Each has a code that `weft explain` tells more about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One objection: a code, where, a sentence, and a witness that a person can follow.

    `cell` is the place in the rank's row, or None where the finding is about no single cell. `steps` is the
    witness: for a deadlock the chain of ops that wait for each other, one a line.
    """

    code: str
    rank: int
    cell: int | None
    message: str
    steps: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.code} rank {self.rank}: {self.message}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "code": self.code,
            "rank": self.rank,
            "cell": self.cell,
            "message": self.message,
            "steps": list(self.steps),
        }


@dataclass(frozen=True)
class Report:
    """What verifying found; `findings` is empty for a clean schedule."""

    num_ranks: int
    num_cells: int
    num_ops: int
    peak_activations: tuple[int, ...]
    findings: tuple[Finding, ...]

    @property
    def clean(self) -> bool:
        """Nothing to object to."""
        return not self.findings

    def __str__(self) -> str:
        if self.findings:
            return "\n".join(map(str, self.findings))
        peak = max(self.peak_activations, default=0)
        return f"clean: {self.num_ranks} ranks, {self.num_cells} cells, peak {peak} activations"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "clean": self.clean,
            "num_ranks": self.num_ranks,
            "num_cells": self.num_cells,
            "num_ops": self.num_ops,
            "peak_activations": list(self.peak_activations),
            "findings": [finding.as_dict() for finding in self.findings],
        }
