"""Costs of ops: durations, bytes moved and bytes saved, as a table from a TOML file or a preset.

    name = "my cluster"
    about = "measured on ..."
    unit = "us"      # of all times; us, ms, or abstract units

    [model]          # the whole model: each schedule cuts it into its own stages
    layers = 61      # dense = 3: the first three are dense; mtp = 1: an MTP block behind them
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
    [dense]          # a dense layer, where it differs
    mlp_f = 20
    [ends]           # the blocks besides layers: embedding, MTP blocks, head and loss
    head_f = 20
    [message]        # one message, copy or collective
    send = 5
    [step]           # what ends a step
    optimizer = 900
    [stage.3]        # a stage that is slower
    factor = 1.2
    [microbatch]     # micro-batches that are not alike
    lengths = [4096, 1024, 2048, 2048]
    [saved_bytes]    # what a part's forward keeps for its backward
    attn = 1000000
    [moved_bytes]
    send = 500000

All sections are optional. `treadle.costs.format` lists every key with its meaning, docs/costs.md explains them.

**What a layer takes.** The first of these that the file has: the times of [model] over its layers, those of [cells]
over its layers, the parts of [layer] added up. A dense layer takes what [dense] says; the parts that it does not say
are those of [layer], without exchanges. Where a program knows the blocks of its stages, a stage takes what its layers
take together, and what [ends] says of its other blocks. A layer's time is a whole number of ticks (nanoseconds).

**What a chunk takes** where its layers are not known is what [cells] says, or the parts of one layer added up.

At the grain of layers attention and MLP take what [layer] says. If it has no time of theirs, they share what the
layer (or the chunk, where [cells] does not say its layers) takes, half and half. What is not given at all is 0, and
`treadle.costs.missing` names it. `[stage.N] factor` multiplies what the stage computes, [microbatch] all times of a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from shlex import quote
from typing import Any

from treadle.costs.format import NUMBERED, SECTIONS, KeyKind, Section
from treadle.costs.reading import read
from treadle.fields.input_files import toml_value
from treadle.ir.blocks import LAYERS
from treadle.ir.ops import (
    ACTIONS,
    BACKWARD,
    BLOCK_PARTS,
    COMPUTE_PARTS,
    EXCHANGES,
    FORWARD,
    LAYER_PARTS,
    STEP_END,
    OpKind,
    OpPhase,
    OpRole,
    of_parts,
)
from treadle.ir.trace import MICROSECONDS, Clock

CELLS = (*(kind.cost_key for kind in ACTIONS), "fb")
LAYER = tuple(kind.cost_key for kind in (*FORWARD, *BACKWARD))
WEIGHTS = tuple(kind.cost_key for kind in of_parts(OpPhase.W, reversed(LAYER_PARTS)))
EXCHANGE = tuple(kind.cost_key for kind in EXCHANGES)
"""The parts of a layer that exchange tokens with experts, or wait for that."""
_COMPUTE = tuple(part for part in (*LAYER, *WEIGHTS) if part not in EXCHANGE)
PHASES = {"f": (OpPhase.F,), "i": (OpPhase.B,), "w": (OpPhase.W,), "b": (OpPhase.B, OpPhase.W)}
"""The phases of a block's parts that an action is made of."""
_PARTS = {"f": LAYER[: len(FORWARD)], "i": LAYER[len(FORWARD) :], "w": WEIGHTS}
"""The parts of a layer that an action is made of."""
_BESIDES = {
    block: {
        action: tuple(kind.cost_key for phase in phases for kind in of_parts(phase, (part,)))
        for action, phases in PHASES.items()
    }
    for block, part in BLOCK_PARTS.items()
}
"""What an action of a stage includes besides its layers, by block."""

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
    dense: Mapping[str, int] = field(default_factory=dict)
    step: Mapping[str, int] = field(default_factory=dict)
    microbatch: Mapping[str, Any] = field(default_factory=dict)
    stage: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    def cell(self, name: str) -> int:
        """Ticks of a whole action of a chunk: what is given, or what its parts add up to."""
        return self._action(self.cells, name, 1)

    def of_layer(self, name: str, block: str = "t") -> int:
        """Ticks of a whole action of one layer; `block` is d for a dense one.

        Raises:
            ValueError: the costs say only what a chunk takes, not how many layers it has.

        """
        if not self.says_layers:
            raise ValueError(
                f"costs {self.name!r} say what a chunk takes, not how many layers it has; "
                "add layers = N to their [cells], or a [model] or [layer] section"
            )
        if block == "d":
            return self._of_dense(name)
        return self._action(self.by_layers, name, self.by_layers.get("layers", 1))

    def _of_dense(self, name: str) -> int:
        if name in self.dense:
            return self.dense[name]
        if name in ("b", "fb"):
            return sum(self._of_dense(half) for half in (("i", "w") if name == "b" else ("f", "b")))
        parts = [part for part in _PARTS[name] if part not in EXCHANGE]
        if any(part in self.dense for part in parts) or not self.by_layers:
            return sum(self.dense_part(part) for part in parts)
        return self.of_layer(name)

    def dense_part(self, part: str) -> int:
        """Ticks of a part of a dense layer; 0 where the costs do not say."""
        return self.dense.get(part, self.layer.get(part, 0))

    def of_stage(self, name: str, row: str) -> int:
        """Ticks of f, b, i or w of a stage with this row of blocks."""
        layers = sum(self.of_layer(name, block) for block in row if block in LAYERS)
        besides = [end for block in row if block in _BESIDES for end in _BESIDES[block][name]]
        return layers + sum(self.ends.get(end, 0) for end in besides)

    def of_block(self, block: str) -> int:
        """Ticks of a whole forward and backward of one block."""
        return self.of_stage("f", block) + self.of_stage("b", block)

    @property
    def step_end(self) -> tuple[OpKind, ...]:
        """What ends a step: what the costs give a time, with the optimizer's step between."""
        if not self.step:
            return ()
        return tuple(kind for kind in STEP_END if kind is OpKind.OPTIMIZER or kind.cost_key in self.step)

    def stage_factors(self, name: str, num_stages: int) -> tuple[float, ...]:
        """Return `factor` or `saved_factor` of each stage; empty where all are 1.

        Raises:
            ValueError: the costs name a stage that does not exist, or one of a cut into another number of stages.

        """
        for stage, entries in sorted(self.stage.items()):
            if entries.get("stages", num_stages) != num_stages:
                raise ValueError(
                    f"costs {self.name!r} have [stage.{stage}] of a cut into {entries['stages']:.0f} stages, and the "
                    f"schedule has {num_stages}; leave their [stage] sections out, or take a schedule of "
                    f"{entries['stages']:.0f} stages"
                )
        if self.stage and max(self.stage) >= num_stages:
            raise ValueError(
                f"costs {self.name!r} have [stage.{max(self.stage)}], and the schedule has stages 0 to "
                f"{num_stages - 1}; leave that section out, or fit with `blocks`: costs of a model are for every cut"
            )
        factors = tuple(float(self.stage.get(stage, {}).get(name, 1.0)) for stage in range(num_stages))
        return factors if any(factor != 1.0 for factor in factors) else ()

    @property
    def by_layers(self) -> Mapping[str, int]:
        """The section that says what so many layers take: [model], or [cells] with layers; empty if neither does.

        A [model] without times says only how many layers there are.
        """
        of_cells = self.cells if "layers" in self.cells else {}
        return self.model if any(action in self.model for action in CELLS) else of_cells or self.model

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

    def has_block(self, block: str) -> bool:
        """True if the costs give an embedding (E), MTP blocks (m) or a head (L) a time."""
        return any(name.startswith(BLOCK_PARTS[block]) for name in self.ends)

    def unsaved(self, blocks: str) -> tuple[str, ...]:
        """Return the parts of these blocks, and of every layer, whose saved bytes the costs lack."""
        of_layers = (part for part in COMPUTE_PARTS if part.blocks == LAYERS)
        parts = (*of_layers, *(name for block, name in BLOCK_PARTS.items() if block in blocks))
        return tuple(str(part) for part in parts if part not in self.saved_parts)

    @property
    def blocks(self) -> str:
        """The kinds of blocks that the costs are about."""
        return "".join(block for block in BLOCK_PARTS if self.has_block(block))

    def message_bytes(self, kind: OpKind) -> int:
        """Bytes that an op of this kind moves."""
        if kind.role is OpRole.COPY:
            whole = sum(self.saved_parts.get(part, 0) for part in COMPUTE_PARTS)
            return self.saved_bytes.get("offload", whole)
        return self.moved_bytes.get(kind.size_key, 0)


def parse(text: str, source: str = "<text>") -> Costs:
    """Read costs from TOML.

    Raises:
        ValueError: the text holds no costs; the message names the line and the field.

    """
    table, problems = read(text)
    if problems:
        more = f" (and {len(problems) - 1} more: treadle costs check {quote(source)})" if len(problems) > 1 else ""
        raise ValueError(f"{problems[0].at(source)}{more}")
    clock = _CLOCKS[table.get("unit", "us")]
    sections = {name: _numbers(table.get(name, {}), SECTIONS[name], clock) for name in SECTIONS}
    stage = {int(n): _numbers(entries, NUMBERED["stage"], clock) for n, entries in table.get("stage", {}).items()}
    return Costs(table.get("name", source), clock, **sections, about=table.get("about", ""), stage=stage)


def _numbers(entries: Mapping[str, Any], section: Section, clock: Clock) -> dict[str, Any]:
    return {key: _number(value, section.key(key).kind, clock) for key, value in entries.items()}


def _number(value: Any, kind: KeyKind, clock: Clock) -> Any:
    """A number of the file as costs hold it: times in ticks, whole; factors as they are."""
    if kind is KeyKind.FACTORS:
        return tuple(float(each) for each in value)
    if kind in (KeyKind.FACTOR, KeyKind.SHARE):
        return float(value)
    return round(value * clock.ticks) if kind is KeyKind.TIME else round(value)


def dump(costs: Costs, *, comments: bool = False) -> str:
    """Write TOML that `parse` reads back to the same costs; `comments` say what each entry is."""
    lines = [f"name = {toml_value(costs.name)}"]
    if costs.about:
        lines.append(f"about = {toml_value(costs.about)}")
    lines.append(f"unit = {toml_value(costs.clock.unit)}")
    for name, section in SECTIONS.items():
        lines += _written(f"[{name}]", section, getattr(costs, name), costs.clock, comments=comments)
    for number, entries in sorted(costs.stage.items()):
        lines += _written(f"[stage.{number}]", NUMBERED["stage"], entries, costs.clock, comments=comments)
    return "\n".join(lines) + "\n"


def _written(title: str, section: Section, entries: Mapping[str, Any], clock: Clock, *, comments: bool) -> list[str]:
    if not entries:
        return []
    written = [f"{key} = {_text(value, section.key(key).kind, clock)}" for key, value in entries.items()]
    if comments:
        width = max(map(len, written))
        written = [f"{text:{width}}  # {section.key(key).meaning}" for key, text in zip(entries, written, strict=True)]
    return ["", title + (f"  # {section.meaning}" if comments else ""), *written]


def _text(value: Any, kind: KeyKind, clock: Clock) -> str:
    if kind in (KeyKind.FACTORS, KeyKind.FACTOR, KeyKind.SHARE):
        return toml_value(value)
    scale = clock.ticks if kind is KeyKind.TIME else 1
    return str(value // scale) if value % scale == 0 else repr(value / scale)
