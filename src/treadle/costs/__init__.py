"""Costs: how long ops take. `unit` and the presets by name, anything else from a TOML file."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from treadle.costs.costs import EXCHANGE, UNIT, Costs, dump, parse
from treadle.costs.durations import durations, ticks
from treadle.costs.format import schema
from treadle.costs.lacking import Lack, lacks, missing
from treadle.costs.reading import Problem, read
from treadle.fields.input_files import read_text
from treadle.fields.nearest import did_you_mean

UNIT_COSTS = Costs(
    "unit",
    UNIT,
    cells={"layers": 1, "f": UNIT.ticks, "i": UNIT.ticks, "w": UNIT.ticks, "b": 2 * UNIT.ticks, "fb": 3 * UNIT.ticks},
    layer=dict.fromkeys(EXCHANGE, 0),
    message=dict.fromkeys(("send", "offload", "onload", "reduce_grad"), 0),
    about="F = I = W = 1, B = 2, (F|B) = 3, communication free",
)
"""A chunk's forward takes 1; a layer's does where a program knows its layers, so F takes as many as a stage has."""

PRESETS = ("deepseek-v3-h800", "deepseek-v3-model")


def load_costs(name: str) -> Costs:
    """Load costs by name.

    Args:
        name: `unit` (F = I = W = 1, communication free), a preset, or the path of a TOML file.

    Returns:
        The Costs.

    Raises:
        ValueError: no preset has this name, or the file does not hold costs; the message names line and field.

    Example:
        >>> load_costs("deepseek-v3-h800").clock.unit
        'us'

    """
    if name == "unit":
        return UNIT_COSTS
    return parse(costs_text(name), name)


def costs_text(name: str) -> str:
    """Return the TOML of a preset or a file, as written."""
    if name == "unit":
        return dump(UNIT_COSTS, comments=True)
    if name in PRESETS:
        return files("treadle.costs").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")
    if Path(name).suffix or "/" in name:
        return read_text(name)
    way_out = did_you_mean(name, ("unit", *PRESETS))
    raise ValueError(
        f"{name!r} is not a preset of costs; {way_out} (a file ends in .toml; "
        "'treadle plan --model NAME --cluster GPU:COUNT --files DIR' writes one of a model on GPUs)"
    )


__all__ = [
    "PRESETS",
    "UNIT_COSTS",
    "Costs",
    "Lack",
    "Problem",
    "costs_text",
    "dump",
    "durations",
    "lacks",
    "load_costs",
    "missing",
    "parse",
    "read",
    "schema",
    "ticks",
]
