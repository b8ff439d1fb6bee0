"""What a comparison holds: the sizes that its traces have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from treadle.ir.program import Layout

if TYPE_CHECKING:
    from treadle.simulator.printed_step import SizeJson


@dataclass(frozen=True)
class StepSize:
    """The sizes of a step: a comparison is about schedules where these are the same. None is not known."""

    layers: int | None
    ranks: int
    microbatches: int

    @classmethod
    def of(cls, layout: Layout) -> StepSize:
        """The sizes that a Program's layout has."""
        return cls(layout.model_layers or None, layout.num_ranks, layout.num_microbatches)

    def as_dict(self) -> SizeJson:
        """Return a dict for JSON."""
        return {"layers": self.layers, "ranks": self.ranks, "microbatches": self.microbatches}


_WORDS = {"layers": "{} layers", "ranks": "{} ranks", "microbatches": "{} micro-batches"}


def held_text(sizes: Sequence[tuple[str, StepSize]]) -> str:
    """Return which sizes all have: `same for all: 8 layers, 4 ranks, 16 micro-batches`; and which differ."""
    columns = {name: [asdict(size)[name] for _, size in sizes] for name in _WORDS}
    same = {name: values[0] for name, values in columns.items() if len(set(values)) == 1 and values[0] is not None}
    parts = [f"same for all: {', '.join(_WORDS[name].format(value) for name, value in same.items())}"] if same else []
    for name, values in columns.items():
        if name not in same and any(value is not None for value in values):
            listed = ", ".join(
                f"{who} {value if value is not None else '?'}" for (who, _), value in zip(sizes, values, strict=True)
            )
            parts.append(f"differs: {name.replace('microbatches', 'micro-batches')} ({listed})")
    if "layers" not in same and all(value is None for value in columns["layers"]):
        parts.append("model layers: unknown")
    return "; ".join(parts)
