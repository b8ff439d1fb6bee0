"""Results of checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from treadle.host.errors import TreadleError

CheckStatus: TypeAlias = Literal["passed", "skipped", "failed"]


class SkippedError(TreadleError):
    """A check cannot run here; the text is the reason."""


class FailedError(TreadleError):
    """A check has failed: what was found, and what to do about it."""

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(found, advice)  # the arguments with which unpickling makes it again
        self.found, self.advice = found, advice


@dataclass(frozen=True)
class Passed:
    """What a check that has passed says, and the numbers that it measured."""

    about: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. `advice` is what to do where it failed."""

    name: str
    status: CheckStatus
    about: str
    advice: str
    seconds: float
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class SelfcheckReport:
    """All results, with the machine on which they were had."""

    machine: Mapping[str, Any]
    settings: Mapping[str, str]
    device_type: str
    backend: str
    num_ranks: int
    quick: bool
    seconds: float
    checks: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """Returns whether nothing has failed."""
        return not self.num("failed")

    def num(self, status: CheckStatus) -> int:
        """Returns the number of checks with this status."""
        return sum(check.status == status for check in self.checks)
