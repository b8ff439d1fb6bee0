"""The format of a costs file: its sections and keys, each with its kind and meaning, in one table.

The parser, the writer, the JSON schema and the texts of `treadle costs` all read this table, so a new section is an
entry here and a field of `Costs`. The keys of ops' times are those of the table of ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from treadle.fields.kinds import DIALECT, SHARE, Field, ListOf, Number, ObjectOf, OneOf, TableOf, Text, ValueKind
from treadle.ir.ops import ACTIONS, BLOCK_PARTS, COMPUTE_PARTS, KIND_OF, RECOMPUTE, OpKind, OpPart, OpPhase, where


class KeyKind(Enum):
    """What the number of a key is."""

    TIME = "time, in the file's unit"
    BYTES = "bytes"
    COUNT = "a whole number from 1"
    FACTOR = "a number above 0"
    SHARE = "a number from 0 to 1"
    FACTORS = "a list of numbers above 0"

    @property
    def value_kind(self) -> ValueKind:
        """What a value of this kind may be."""
        return _VALUE_KINDS[self]


LIMIT = 1e12
"""Times and sizes are below this; a larger number is taken for a typing error."""
MOST_LAYERS = 32_767
"""Layers are numbered by 16 bits."""
MOST_FACTOR = 1e6
"""Factors are at most this."""

_AMOUNT = Number(0, LIMIT, below=True)
_FACTOR = Number(0, MOST_FACTOR, above=True)
_VALUE_KINDS: dict[KeyKind, ValueKind] = {
    KeyKind.TIME: _AMOUNT,
    KeyKind.BYTES: _AMOUNT,
    KeyKind.COUNT: Number(1, MOST_LAYERS, whole=True),
    KeyKind.FACTOR: _FACTOR,
    KeyKind.SHARE: SHARE,
    KeyKind.FACTORS: ListOf(_FACTOR, 1, f"a list of numbers above 0, up to {MOST_FACTOR:g}, one for each micro-batch"),
}


@dataclass(frozen=True)
class Key:
    """A key of a section."""

    name: str
    kind: KeyKind
    meaning: str


@dataclass(frozen=True)
class Section:
    """A section of the file. `meaning` says what one entry is about."""

    meaning: str
    keys: tuple[Key, ...]
    required: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its keys."""
        return tuple(key.name for key in self.keys)

    def key(self, name: str) -> Key:
        """The key of a name."""
        return next(key for key in self.keys if key.name == name)


def _times_of(kinds: Iterable[OpKind]) -> tuple[Key, ...]:
    """The keys of ops' times, as the table of ops explains them; ops may share one."""
    keys = [Key(kind.cost_key, KeyKind.TIME, kind.about + _if_left_out(kind)) for kind in kinds]
    return tuple({key.name: key for key in keys}.values())


def _if_left_out(kind: OpKind) -> str:
    return f"; {RECOMPUTE[kind].cost_key} if left out" if kind in RECOMPUTE else ""


def _saved_sizes() -> Iterator[Key]:
    """The keys of what parts save, of a layer's parts also their inputs and those of a dense layer."""
    whole = {part: KIND_OF[part, OpPhase.F].about.removesuffix(", forward") for part in OpPart if part.blocks}
    dense = [part for part in COMPUTE_PARTS if "d" in part.blocks]
    for part in COMPUTE_PARTS:
        yield Key(str(part), KeyKind.BYTES, f"{whole[part]} of a layer")
    for part in COMPUTE_PARTS:
        yield Key(f"{part}_input", KeyKind.BYTES, f"of {part}, what stays where it is recomputed: its inputs")
    for part in dense:
        yield Key(f"dense_{part}", KeyKind.BYTES, f"{whole[part]} of a dense layer; {part} if left out")
    for part in dense:
        stays = f"of dense_{part}, what stays where it is recomputed; {part}_input if left out"
        yield Key(f"dense_{part}_input", KeyKind.BYTES, stays)
    yield Key("offload", KeyKind.BYTES, "of a layer, what an offload copies; all that its forward saves if left out")
    yield Key("dense_offload", KeyKind.BYTES, "the same of a dense layer; offload if left out")
    for part in BLOCK_PARTS.values():
        yield Key(str(part), KeyKind.BYTES, whole[part])


def _moved_sizes() -> tuple[Key, ...]:
    """The keys of what messages and collectives move; the phases of one share a key."""
    keys = [Key(kind.size_key, KeyKind.BYTES, kind.about.partition(", ")[0]) for kind in OpKind if kind.size_key]
    return tuple({key.name: key for key in keys}.values())


_PAIR = Key("fb", KeyKind.TIME, "overlapped forward and backward; f + b if left out")

SECTIONS: dict[str, Section] = {
    "model": Section(
        "the whole model, one micro-batch; every schedule cuts it into its own stages",
        (
            Key("layers", KeyKind.COUNT, "layers of the model, the dense ones included, but no MTP block"),
            Key("dense", KeyKind.COUNT, "how many of them, from the first on, are dense; none if left out"),
            Key("mtp", KeyKind.COUNT, "MTP blocks after the layers, each with a loss of its own; none if left out"),
            *_times_of(ACTIONS),
            _PAIR,
            Key("saved_bytes", KeyKind.BYTES, "what the forwards of all layers keep for their backwards"),
        ),
        required=("layers",),
    ),
    "cells": Section(
        "whole actions of one chunk, one micro-batch",
        (
            Key(
                "layers", KeyKind.COUNT, "layers of that chunk; without it a chunk takes these times however deep it is"
            ),
            *_times_of(ACTIONS),
            _PAIR,
        ),
    ),
    "layer": Section(
        "the parts of one layer, one micro-batch; the router counts with attention",
        _times_of(where(cost="layer")),
    ),
    "dense": Section(
        "one dense layer, one micro-batch; what is left out is as in other layers, without their exchanges",
        (*_times_of(ACTIONS), *_times_of(kind for kind in where(cost="layer") if "d" in kind.blocks)),
    ),
    "ends": Section(
        "the blocks besides layers: an embedding before them, MTP blocks and a head after them",
        _times_of(kind for part in BLOCK_PARTS.values() for kind in where(cost="ends") if kind.part is part),
    ),
    "message": Section("one message, copy or collective", _times_of(where(cost="message"))),
    "step": Section(
        "end-of-step ops: an op runs if it has a time, and any entry implies the optimizer",
        _times_of(where(cost="step")),
    ),
    "saved_bytes": Section("what a forward keeps for its backward, one micro-batch", tuple(_saved_sizes())),
    "moved_bytes": Section(
        "what one message or collective moves; for reports, times do not follow from it", _moved_sizes()
    ),
    "microbatch": Section(
        "micro-batches that are not alike: factors, or lengths with a law; a number for each, pipe after pipe",
        (
            Key("factors", KeyKind.FACTORS, "multiply the times of each micro-batch"),
            Key("saved_factors", KeyKind.FACTORS, "multiply what each micro-batch saves; as factors if left out"),
            Key("lengths", KeyKind.FACTORS, "the length of each micro-batch: times and saved bytes grow with it"),
            Key("reference", KeyKind.FACTOR, "the length that the other sections are about; the mean if left out"),
            Key(
                "quadratic",
                KeyKind.SHARE,
                "the share of attention's time, at that length, that grows with its square; 0 if left out",
            ),
        ),
    ),
}

NUMBERED: dict[str, Section] = {
    "stage": Section(
        "a stage that is not like the others, by its number: [stage.3]",
        (
            Key("factor", KeyKind.FACTOR, "multiplies the times of all that the stage computes"),
            Key("saved_factor", KeyKind.FACTOR, "multiplies what the stage saves"),
            Key("stages", KeyKind.COUNT, "how many stages its cut has; a schedule with more or fewer is refused"),
        ),
    ),
}
"""Sections of which there is one for each number: `[stage.3]`."""
NUMBER = "^(0|[1-9][0-9]{0,4})$"
"""The number of such a section."""

UNITS = ("unit", "us", "ms")
"""Values of the key `unit`: abstract units, microseconds, milliseconds."""

TEXTS = {
    "name": "the name of these costs; the file's path if left out",
    "about": "where the numbers come from, and which are assumed",
    "unit": "the unit of all times: unit (abstract), us or ms; us if left out",
}


def _object_of(section: Section) -> ObjectOf:
    fields = {
        key.name: Field(key.kind.value_kind, f"{key.meaning} ({key.kind.value})", key.name in section.required)
        for key in section.keys
    }
    return ObjectOf(fields, f"a section with a number for each of {', '.join(section.names)}")


def _numbered(name: str, section: Section) -> TableOf:
    form = f"a section for each number, such as [{name}.3]"
    return TableOf(_object_of(section), NUMBER, form, f"not a number of a {name}; write [{name}.3]")


FILE = ObjectOf(
    {
        **{name: Field(OneOf(UNITS) if name == "unit" else Text(), about, False) for name, about in TEXTS.items()},
        **{name: Field(_object_of(section), section.meaning, False) for name, section in SECTIONS.items()},
        **{name: Field(_numbered(name, section), section.meaning, False) for name, section in NUMBERED.items()},
    },
    names=(*TEXTS, *(f"[{name}]" for name in (*SECTIONS, *NUMBERED))),
)
"""What a costs file holds."""


def schema() -> dict[str, Any]:
    """Return the JSON schema of a costs file."""
    return {"$schema": DIALECT, "title": "Costs of a training step", **FILE.schema()}
