"""Costs: how long ops take. `unit` and the presets by name, anything else from a TOML file."""

from __future__ import annotations

import difflib
from importlib.resources import files
from pathlib import Path

from treadle.costs.costs import UNIT, Costs, dump, parse
from treadle.costs.durations import durations, ticks

UNIT_COSTS = Costs(
    "unit",
    UNIT,
    cells={"f": UNIT.ticks, "i": UNIT.ticks, "w": UNIT.ticks, "b": 2 * UNIT.ticks, "fb": 3 * UNIT.ticks},
    saved_bytes={"attn": 1, "mlp": 1},
    about="F = I = W = 1, B = 2, (F|B) = 3, communication free",
)

PRESETS = ("deepseek-v3-h800",)


def load_costs(name: str) -> Costs:
    """Load costs by name.

    Args:
        name: `unit` (F = I = W = 1, communication free), a preset, or the path of a TOML file.

    Raises:
        ValueError: no preset has this name, or the file does not hold costs.

    Example:
        >>> load_costs("deepseek-v3-h800").clock.unit
        'us'

    """
    if name == "unit":
        return UNIT_COSTS
    if name in PRESETS:
        text = files("treadle.costs").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")
        return parse(text, name)
    if Path(name).suffix or "/" in name:
        return parse(Path(name).read_text(encoding="utf-8"), name)
    known = ("unit", *PRESETS)
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
    raise ValueError(f"{name!r} is not a preset of costs; {hint} (a file ends in .toml)")


__all__ = ["PRESETS", "UNIT_COSTS", "Costs", "dump", "durations", "load_costs", "parse", "ticks"]
