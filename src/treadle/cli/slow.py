"""Options about ranks that are slower than others."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from treadle.simulator import Stragglers


def _option(name: str, help: str) -> Any:
    return typer.Option(f"--{name}", help=help, rich_help_panel="Slow ranks")


@dataclass(frozen=True)
class Slow:
    """The options as given."""

    slowness: Annotated[float, _option("slowness", "Each rank slower by a random share of up to so much: 0.05.")] = 0.0
    share: Annotated[
        str | None, _option("stragglers", "So many ranks slower than all others, drawn at random: 0.1% or 0.001.")
    ] = None
    factor: Annotated[
        float | None, _option("straggler-factor", "By which factor stragglers are slower; 1.2 if not given.")
    ] = None
    seed: Annotated[int, _option("seed", "Of that randomness.")] = 0

    def check(self) -> None:
        """Raise a ValueError if a number is out of its range."""
        if not 0 <= self.slowness <= 10:
            raise ValueError(f"--slowness is a share from 0 to 10, such as 0.05, got {self.slowness}")
        if self.factor is not None and self.share is None:
            raise ValueError("--straggler-factor is about stragglers; give their share: --stragglers 0.1%")
        self.stragglers()

    def stragglers(self) -> Stragglers | None:
        """Return the stragglers, if there are any."""
        from treadle.simulator import Stragglers

        if self.share is None:
            return None
        return Stragglers(parse_share(self.share), 1.2 if self.factor is None else self.factor)


def parse_share(text: str) -> float:
    """`0.1%`, or `0.001`."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(%?)", text)
    share = float(match[1]) / (100 if match[2] else 1) if match is not None else -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"{text!r} is not a share; write 0.1% or 0.001, up to 100% or 1")
    return share
