"""The format of a costs file: its sections and keys, each with its kind and meaning, in one table.

The parser, the writer, the JSON schema and the texts of `treadle costs` read this table, so a new section is an
entry here and a field of `Costs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from treadle.fields.kinds import DIALECT, SHARE, Field, ListOf, Number, ObjectOf, OneOf, TableOf, Text, ValueKind


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


def _times(**meanings: str) -> tuple[Key, ...]:
    return tuple(Key(name, KeyKind.TIME, meaning) for name, meaning in meanings.items())


def _sizes(**meanings: str) -> tuple[Key, ...]:
    return tuple(Key(name, KeyKind.BYTES, meaning) for name, meaning in meanings.items())


_ACTIONS = _times(
    f="forward",
    b="whole backward; i + w if left out",
    i="dgrad",
    w="wgrad",
    fb="overlapped forward and backward; f + b if left out",
)

SECTIONS: dict[str, Section] = {
    "model": Section(
        "the whole model, one micro-batch; every schedule cuts it into its own stages",
        (
            Key("layers", KeyKind.COUNT, "layers of the model, the dense ones included, but no MTP block"),
            Key("dense", KeyKind.COUNT, "how many of them, from the first on, are dense; none if left out"),
            Key("mtp", KeyKind.COUNT, "MTP blocks after the layers, each with a loss of its own; none if left out"),
            *_ACTIONS,
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
            *_ACTIONS,
        ),
    ),
    "layer": Section(
        "the parts of one layer, one micro-batch",
        _times(
            attn_f="attention, norms and router, forward",
            counts="exchange of token counts between experts",
            host="the host's wait for these counts",
            dispatch_f="all-to-all of tokens to their experts, forward",
            mlp_f="MLP or experts, forward",
            combine_f="all-to-all of tokens back, forward",
            combine_b="all-to-all of combine, backward",
            mlp_b="MLP or experts, dgrad",
            dispatch_b="all-to-all of dispatch, backward",
            attn_b="attention, norms and router, dgrad",
            mlp_w="MLP or experts, wgrad",
            attn_w="attention, norms and router, wgrad",
            attn_r="attention, norms and router, recomputed; attn_f if left out",
            mlp_r="MLP or experts, recomputed; mlp_f if left out",
        ),
    ),
    "dense": Section(
        "one dense layer, one micro-batch; what is left out is as in other layers, without their exchanges",
        (
            *_ACTIONS[:4],
            *_times(
                attn_f="attention and norms, forward",
                mlp_f="MLP, forward",
                mlp_b="MLP, dgrad",
                attn_b="attention and norms, dgrad",
                mlp_w="MLP, wgrad",
                attn_w="attention and norms, wgrad",
                attn_r="attention and norms, recomputed; attn_f if left out",
                mlp_r="MLP, recomputed; mlp_f if left out",
            ),
        ),
    ),
    "ends": Section(
        "the blocks besides layers: an embedding before them, MTP blocks and a head after them",
        _times(
            embed_f="embedding, forward",
            embed_b="embedding, backward",
            mtp_f="an MTP block with its loss, forward",
            mtp_b="an MTP block with its loss, dgrad",
            mtp_w="an MTP block, wgrad",
            head_f="head and loss, forward",
            head_b="head and loss, dgrad",
            head_w="head, wgrad",
        ),
    ),
    "message": Section(
        "one message, copy or collective",
        _times(
            send="an activation or a gradient to the next stage",
            offload="the saved activations of a layer to the host",
            onload="the saved activations of a layer back to the device",
            reduce_grad="the reduction of a chunk's gradients over data parallelism",
            reduce_tied="the reduction of a parameter that stages share, as embedding and head do",
        ),
    ),
    "step": Section(
        "end-of-step ops; an op runs if it has a time, and any entry implies the optimizer",
        _times(
            clip="the norm over all ranks, and clipping",
            optimizer="the optimizer's step",
            gather_params="the all-gather of parameters over data parallelism",
        ),
    ),
    "saved_bytes": Section(
        "what a forward keeps for its backward, one micro-batch",
        _sizes(
            attn="attention, norms and router of a layer",
            mlp="MLP or experts of a layer",
            attn_input="of attn, what stays where it is recomputed: its inputs",
            mlp_input="of mlp, what stays where it is recomputed: its inputs",
            dense_attn="attention and norms of a dense layer; attn if left out",
            dense_mlp="MLP of a dense layer; mlp if left out",
            dense_attn_input="of dense_attn, what stays where it is recomputed; attn_input if left out",
            dense_mlp_input="of dense_mlp, what stays where it is recomputed; mlp_input if left out",
            embed="the embedding",
            mtp="an MTP block with its loss",
            head="head and loss",
        ),
    ),
    "moved_bytes": Section(
        "what one message or collective moves; for reports, times do not follow from it",
        _sizes(
            send="an activation or a gradient to the next stage",
            counts="token counts",
            dispatch="tokens to their experts",
            combine="tokens back",
            reduce_grad="a chunk's gradients",
            reduce_tied="the gradient of a parameter that stages share",
        ),
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
