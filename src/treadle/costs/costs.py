"""Costs of ops: durations, bytes moved and bytes saved, as a table from a TOML file or a preset.

    name = "my cluster"
    about = "measured on ..."
    unit = "us"

    [cells]          # whole actions of a chunk, for the grain of cells
    f = 100
    i = 90
    w = 60           # b is i + w and fb is f + b where they are not given
    [layer]          # the parts of one layer, for the grain of layers
    attn_f = 40
    dispatch_f = 30
    [ends]           # what the first stage has before its layers, and the last behind them, the loss included
    head_f = 20
    [message]        # one message, copy or collective
    send = 5
    [saved_bytes]    # what a part's forward keeps for its backward
    attn = 1000000
    [moved_bytes]
    send = 500000

What is not given is 0, except that the parts of a layer share a chunk's f, i and w where [layer] is not given.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treadle.ir.program import OpKind
from treadle.ir.trace import MICROSECONDS, Clock

CELLS = ("f", "b", "i", "w", "fb")
LAYER = ("attn_f", "counts", "host", "dispatch_f", "mlp_f", "combine_f", "combine_b", "mlp_b", "dispatch_b", "attn_b")
WEIGHTS = ("mlp_w", "attn_w")
ENDS = ("embed_f", "embed_b", "head_f", "head_b", "head_w")
MESSAGE = ("send", "offload", "onload", "reduce_grad")
SAVED = ("attn", "mlp", "embed", "head")
MOVED = ("send", "counts", "dispatch", "combine", "reduce_grad")
_SECTIONS = {
    "cells": CELLS,
    "layer": (*LAYER, *WEIGHTS),
    "ends": ENDS,
    "message": MESSAGE,
    "saved_bytes": SAVED,
    "moved_bytes": MOVED,
}

UNIT = Clock("unit", 720_720)
"""Divisible by every number up to 16, so that shares of a unit stay whole."""

_CLOCKS = {"unit": UNIT, "us": MICROSECONDS, "ms": Clock("ms", 1_000_000)}


@dataclass(frozen=True)
class Costs:
    """Times in ticks of the clock, sizes in bytes. Absent entries are 0.

    Example:
        >>> unit = treadle.load_costs("unit")
        >>> unit.clock.show(unit.cell("fb"))
        3

    """

    name: str
    clock: Clock
    cells: Mapping[str, int] = field(default_factory=dict)
    layer: Mapping[str, int] = field(default_factory=dict)
    ends: Mapping[str, int] = field(default_factory=dict)
    message: Mapping[str, int] = field(default_factory=dict)
    saved_bytes: Mapping[str, int] = field(default_factory=dict)
    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    about: str = ""

    def cell(self, name: str) -> int:
        """Ticks of a whole action: what is given, or what its parts add up to."""
        if name in self.cells:
            return self.cells[name]
        if name == "b":
            return self.cell("i") + self.cell("w")
        if name == "fb":
            return self.cell("f") + self.cell("b")
        parts = {"f": LAYER[:6], "i": LAYER[6:], "w": WEIGHTS}[name]
        return sum(self.layer.get(part, 0) for part in parts)

    def message_bytes(self, kind: OpKind) -> int:
        """Bytes that an op of this kind moves."""
        if kind in (OpKind.OFFLOAD, OpKind.ONLOAD):
            return sum(self.saved_bytes.get(part, 0) for part in ("attn", "mlp"))
        name = kind.name.lower()
        name = "send" if kind.is_send or kind.is_recv else name
        return self.moved_bytes.get(name.removesuffix("_f").removesuffix("_b"), self.moved_bytes.get(name, 0))


def parse(text: str, source: str = "<text>") -> Costs:
    """Costs from TOML."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source}: not TOML: {error}") from None
    allowed = ("name", "about", "unit", *_SECTIONS)
    for key in table:
        if key not in allowed:
            raise ValueError(f"{source}: {_unknown(key, allowed)}")
    unit = table.get("unit", "us")
    if unit not in _CLOCKS:
        raise ValueError(f"{source}: unit is {' or '.join(_CLOCKS)}, got {unit!r}")
    clock = _CLOCKS[unit]
    times = {s: _numbers(table, s, clock.ticks, source) for s in ("cells", "layer", "ends", "message")}
    sizes = {s: _numbers(table, s, 1, source) for s in ("saved_bytes", "moved_bytes")}
    name, about = str(table.get("name", source)), str(table.get("about", ""))
    return Costs(name, clock, **times, **sizes, about=about)


def _numbers(table: Mapping[str, Any], section: str, scale: int, source: str) -> dict[str, int]:
    entries = table.get(section, {})
    if not isinstance(entries, dict):
        raise ValueError(
            f"{source}: [{section}] is a section with a number for each of {', '.join(_SECTIONS[section])}"
        )
    for key, value in entries.items():
        if key not in _SECTIONS[section]:
            raise ValueError(f"{source}: [{section}] {_unknown(key, _SECTIONS[section])}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
            raise ValueError(f"{source}: [{section}] {key} is a number from 0, got {value!r}")
    return {key: round(value * scale) for key, value in entries.items()}


def _unknown(key: str, allowed: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(key, allowed, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(allowed)}"
    return f"{key!r} is not known; {hint}"


def dump(costs: Costs) -> str:
    """TOML that `parse` reads back to the same costs."""
    lines = [f"name = {_quote(costs.name)}"]
    if costs.about:
        lines.append(f"about = {_quote(costs.about)}")
    lines.append(f"unit = {_quote(costs.clock.unit)}")
    for section in _SECTIONS:
        entries = getattr(costs, section)
        scale = 1 if section.endswith("bytes") else costs.clock.ticks
        if entries:
            lines += ["", f"[{section}]", *(f"{key} = {_number(value, scale)}" for key, value in entries.items())]
    return "\n".join(lines) + "\n"


def _number(value: int, scale: int) -> str:
    return str(value // scale) if value % scale == 0 else repr(value / scale)


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'
