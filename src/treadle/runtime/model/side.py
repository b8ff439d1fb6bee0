"""Side values: what stages read of a micro-batch beside what passes from stage to stage.

Positions, document ids, a mask: a value of each micro-batch under a name, the same on every rank of a pipeline. A
segment reads one by its name; a plain module gets, as keyword arguments, those that its `forward` has parameters for.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from torch import nn

from treadle.fields.nearest import hint

Side: TypeAlias = Mapping[str, Any]

ANY = "**"
"""Among the names that a stage reads: its module takes keyword arguments of any name."""


class Keywords:
    """The side values that a module's `forward` has parameters for."""

    def __init__(self, module: nn.Module) -> None:
        try:
            parameters = list(inspect.signature(module.forward).parameters.values())
        except ValueError:  # a builtin such as torch.relu, put in place of `forward`
            parameters = []
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]

    def of(self, side: Side, num_inputs: int) -> dict[str, Any]:
        """Return those of `side` that the module takes beside its first `num_inputs` arguments."""
        if not side:
            return {}
        taken = self._positional[:num_inputs]
        return {
            name: value
            for name, value in side.items()
            if name not in taken and (self._takes_any or name in self._named)
        }

    def names(self, num_inputs: int) -> set[str]:
        """Return the names that the module could take, `ANY` if it takes all."""
        return {
            *(n for n in self._named if n not in self._positional[:num_inputs]),
            *([ANY] if self._takes_any else []),
        }


def refuse_unread(side: Side, readable: Iterable[str]) -> None:
    """Raise ValueError for a side value that no stage reads: its name is a mistake."""
    names = sorted(readable)
    unread = [name for name in side if name not in names]
    if not unread or ANY in names:
        return
    known = f"stages of this pipeline read {', '.join(names)}" if names else "no stage of this pipeline reads any"
    raise ValueError(f"nothing reads the side value {unread[0]!r}; {known}{hint(unread[0], names)}")


def refuse_missing(side: Side, needed: Mapping[str, str], written: Iterable[str]) -> None:
    """Raise ValueError for a value that a segment reads and nobody gives. `needed`: its name, and who reads it."""
    for name, reader in needed.items():
        if name not in side:
            given = ", ".join(side) or "none"
            raise ValueError(
                f"{reader} reads {name!r}, which no segment before it writes, so it is a side value, and the step has "
                f"the side values: {given}; give step(..., side={{{name!r}: ...}}) on every rank"
                f"{hint(name, sorted({*side, *written}))}"
            )
