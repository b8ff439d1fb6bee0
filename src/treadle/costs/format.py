"""The format of a costs file: its sections and keys, each with its kind and meaning, in one table.

The parser, the writer, the JSON schema and the texts of `treadle costs` all read this table, so a new section is an
entry here and a field of `Costs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class KeyKind(Enum):
    """What the number of a key is."""

    TIME = "time, in the file's unit"
    BYTES = "bytes"
    COUNT = "a whole number from 1"


LIMIT = 1e12
"""Times and sizes are below this; a larger number is taken for a typing error."""
MOST_LAYERS = 32_767
"""Layers are numbered by 16 bits."""


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
    i="input half of the backward",
    w="weight half of the backward",
    fb="overlapped forward and backward; f + b if left out",
)

SECTIONS: dict[str, Section] = {
    "model": Section(
        "the whole model, one micro-batch; every schedule cuts it into its own stages",
        (
            Key("layers", KeyKind.COUNT, "layers of the model, which are taken to be alike"),
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
            mlp_b="MLP or experts, input half of the backward",
            dispatch_b="all-to-all of dispatch, backward",
            attn_b="attention, norms and router, input half of the backward",
            mlp_w="MLP or experts, weight half",
            attn_w="attention, norms and router, weight half",
        ),
    ),
    "ends": Section(
        "what the first stage has before its layers and the last behind them",
        _times(
            embed_f="embedding, forward",
            embed_b="embedding, backward",
            head_f="head and loss, forward",
            head_b="head and loss, input half of the backward",
            head_w="head, weight half",
        ),
    ),
    "message": Section(
        "one message, copy or collective",
        _times(
            send="an activation or a gradient to the next stage",
            offload="the saved activations of a layer to the host",
            onload="the saved activations of a layer back to the device",
            reduce_grad="the reduction of a chunk's gradients over data parallelism",
        ),
    ),
    "saved_bytes": Section(
        "what a forward keeps for its backward, one micro-batch",
        _sizes(
            attn="attention, norms and router of a layer",
            mlp="MLP or experts of a layer",
            embed="the embedding",
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
        ),
    ),
}

UNITS = ("unit", "us", "ms")
"""Values of the key `unit`: abstract units, microseconds, milliseconds."""

TEXTS = {
    "name": "the name of these costs; the file's path if left out",
    "about": "where the numbers come from, and which are assumed",
    "unit": "the unit of all times: unit (abstract), us or ms; us if left out",
}


def schema() -> dict[str, Any]:
    """Return the JSON schema of a costs file."""
    texts: dict[str, Any] = {name: {"type": "string", "description": about} for name, about in TEXTS.items()}
    texts["unit"]["enum"] = list(UNITS)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Costs of a training step",
        "type": "object",
        "additionalProperties": False,
        "properties": {**texts, **{name: _section_schema(section) for name, section in SECTIONS.items()}},
    }


def _section_schema(section: Section) -> dict[str, Any]:
    described: dict[str, Any] = {
        "type": "object",
        "description": section.meaning,
        "additionalProperties": False,
        "properties": {key.name: _key_schema(key) for key in section.keys},
    }
    return {**described, "required": list(section.required)} if section.required else described


def _key_schema(key: Key) -> dict[str, Any]:
    described = f"{key.meaning} ({key.kind.value})"
    if key.kind is KeyKind.COUNT:
        return {"type": "integer", "minimum": 1, "maximum": MOST_LAYERS, "description": described}
    return {"type": "number", "minimum": 0, "exclusiveMaximum": LIMIT, "description": described}
