"""Costs of ops: durations, bytes moved and bytes saved, as a table from a TOML file or a preset.

    name = "my cluster"
    about = "measured on ..."
    unit = "us"      # of all times; us, ms, or abstract units

    [model]          # the whole model: each schedule cuts it into its own stages
    layers = 61
    f = 6100
    i = 5490
    w = 3660         # b is i + w and fb is f + b where they are not given
    saved_bytes = 30500000000
    [cells]          # whole actions of a chunk, as deep as `layers` says
    layers = 1
    f = 100
    i = 90
    w = 60
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

All sections are optional. `treadle.costs.format` lists every key with its meaning, docs/costs.md explains them.

**What a layer takes.** The first of these that the file has: [model] over its layers, [cells] over its layers, the
parts of [layer] added up. Where a program knows the layers of its stages, a stage takes that many times as long, and
the first and the last stage what [ends] says besides. A layer's time is a whole number of ticks (nanoseconds).

**What a chunk takes** where its layers are not known is what [cells] says, or the parts of one layer added up.

At the grain of layers attention and MLP take what [layer] says. If it has no time of theirs, they share what the
layer (or the chunk, where [cells] does not say its layers) takes, half and half. What is not given at all is 0, and
`treadle.costs.missing` names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treadle.costs.format import SECTIONS, KeyKind
from treadle.costs.reading import read
from treadle.ir.program import OpKind
from treadle.ir.trace import MICROSECONDS, Clock

CELLS = ("f", "b", "i", "w", "fb")
LAYER = ("attn_f", "counts", "host", "dispatch_f", "mlp_f", "combine_f", "combine_b", "mlp_b", "dispatch_b", "attn_b")
WEIGHTS = ("mlp_w", "attn_w")
ENDS = SECTIONS["ends"].names
MESSAGE = SECTIONS["message"].names
_PARTS = {"f": LAYER[:6], "i": LAYER[6:], "w": WEIGHTS}
"""The parts of a layer that an action is made of."""
_COMPUTE = ("attn_f", "mlp_f", "mlp_b", "attn_b", *WEIGHTS)
EXCHANGE = tuple(part for part in LAYER if part not in _COMPUTE)
"""The parts of a layer that exchange tokens with experts, or wait for that."""
_FIRST = {"f": ("embed_f",), "i": ("embed_b",), "w": (), "b": ("embed_b",)}
_LAST = {"f": ("head_f",), "i": ("head_b",), "w": ("head_w",), "b": ("head_b", "head_w")}
"""What an action of the first and of the last stage includes besides its layers."""

UNIT = Clock("unit", 720_720)
"""Divisible by every number up to 16, so that shares of a unit stay whole."""

_CLOCKS = {"unit": UNIT, "us": MICROSECONDS, "ms": Clock("ms", 1_000_000)}


@dataclass(frozen=True)
class Costs:
    """Times in ticks of the clock, sizes in bytes; a field is a section of the file. Absent entries are 0.

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
    model: Mapping[str, int] = field(default_factory=dict)

    def cell(self, name: str) -> int:
        """Ticks of a whole action of a chunk: what is given, or what its parts add up to."""
        return self._action(self.cells, name, 1)

    def of_layer(self, name: str) -> int:
        """Ticks of a whole action of one layer.

        Raises:
            ValueError: the costs say only what a chunk takes, not how many layers it has.

        """
        if not self.says_layers:
            raise ValueError(
                f"costs {self.name!r} say what a chunk takes, not how many layers it has; "
                "add layers = N to their [cells], or a [model] or [layer] section"
            )
        return self._action(self.by_layers, name, self.by_layers.get("layers", 1))

    def of_stage(self, name: str, layers: int, *, first: bool = False, last: bool = False) -> int:
        """Ticks of f, b, i or w of a stage with so many layers; the first and the last stage have the model's ends."""
        ends = (*(_FIRST[name] if first else ()), *(_LAST[name] if last else ()))
        return layers * self.of_layer(name) + sum(self.ends.get(end, 0) for end in ends)

    @property
    def by_layers(self) -> Mapping[str, int]:
        """The section that says what so many layers take: [model], or [cells] with layers; empty if neither does."""
        return self.model or (self.cells if "layers" in self.cells else {})

    @property
    def says_layers(self) -> bool:
        """True if the costs say what a layer takes."""
        return bool(self.by_layers) or self.has_parts

    @property
    def has_parts(self) -> bool:
        """True if the costs give times to attention and MLP apart."""
        return any(part in self.layer for part in _COMPUTE)

    def says(self, section: Mapping[str, int], name: str) -> bool:
        """True if f, i or w of a section is given, or the parts of a layer that it adds up to."""
        return name in section or any(part in self.layer for part in _PARTS[name])

    def _action(self, section: Mapping[str, int], name: str, layers: int) -> int:
        if name in section:
            return round(section[name] / layers)
        if name in ("b", "fb"):
            halves = ("i", "w") if name == "b" else ("f", "b")
            return sum(self._action(section, half, layers) for half in halves)
        return sum(self.layer.get(part, 0) for part in _PARTS[name])

    @property
    def saved_parts(self) -> dict[str, int]:
        """What each part saves, in bytes, as far as the costs say; half of what [model] says is attention's."""
        saved = dict(self.saved_bytes)
        if "saved_bytes" in self.model and "attn" not in saved and "mlp" not in saved:
            of_layer = round(self.model["saved_bytes"] / self.model["layers"])
            saved |= {"attn": of_layer // 2, "mlp": of_layer - of_layer // 2}
        return saved

    def has_end(self, end: str) -> bool:
        """True if the costs give the embedding ("embed") or the head ("head") a time."""
        return any(name.startswith(end) for name in self.ends)

    def unsaved(self, *, embedding: bool, head: bool) -> tuple[str, ...]:
        """Return the parts of which the costs do not say what they save."""
        parts = ("attn", "mlp", *(("embed",) if embedding else ()), *(("head",) if head else ()))
        return tuple(part for part in parts if part not in self.saved_parts)

    def message_bytes(self, kind: OpKind) -> int:
        """Bytes that an op of this kind moves."""
        if kind in (OpKind.OFFLOAD, OpKind.ONLOAD):
            return sum(self.saved_parts.get(part, 0) for part in ("attn", "mlp"))
        name = kind.name.lower()
        name = "send" if kind.is_send or kind.is_recv else name
        return self.moved_bytes.get(name.removesuffix("_f").removesuffix("_b"), self.moved_bytes.get(name, 0))


def parse(text: str, source: str = "<text>") -> Costs:
    """Read costs from TOML.

    Raises:
        ValueError: the text holds no costs; the message names the line and the field.

    """
    table, problems = read(text)
    if problems:
        more = f" (and {len(problems) - 1} more: treadle costs check {source})" if len(problems) > 1 else ""
        raise ValueError(f"{problems[0].at(source)}{more}")
    clock = _CLOCKS[table.get("unit", "us")]
    sections = {name: _numbers(table.get(name, {}), name, clock) for name in SECTIONS}
    return Costs(table.get("name", source), clock, **sections, about=table.get("about", ""))


def _numbers(entries: Mapping[str, Any], section: str, clock: Clock) -> dict[str, int]:
    return {key: round(value * _scale(section, key, clock)) for key, value in entries.items()}


def _scale(section: str, key: str, clock: Clock) -> int:
    return clock.ticks if SECTIONS[section].key(key).kind is KeyKind.TIME else 1


def dump(costs: Costs, *, comments: bool = False) -> str:
    """Write TOML that `parse` reads back to the same costs; `comments` say what each entry is."""
    lines = [f"name = {_quote(costs.name)}"]
    if costs.about:
        lines.append(f"about = {_quote(costs.about)}")
    lines.append(f"unit = {_quote(costs.clock.unit)}")
    for name, section in SECTIONS.items():
        entries = getattr(costs, name)
        if not entries:
            continue
        written = [f"{key} = {_number(value, _scale(name, key, costs.clock))}" for key, value in entries.items()]
        if comments:
            width = max(map(len, written))
            written = [
                f"{text:{width}}  # {section.key(key).meaning}" for key, text in zip(entries, written, strict=True)
            ]
        lines += ["", f"[{name}]" + (f"  # {section.meaning}" if comments else ""), *written]
    return "\n".join(lines) + "\n"


def _number(value: int, scale: int) -> str:
    return str(value // scale) if value % scale == 0 else repr(value / scale)


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'
