"""The header of a file: a small JSON object beside the columns of a Program or a Trace.

    "layout": {"placement": {"name": "loop", "stages": [[0], [1]], "pipes": [0]}, "num_mb": 4, "blocks": ["", ""],
               "forward": ["F"], "backward": ["B"], "weights": ["W"], "ep": 1, "dp": 1, "saved": {"F": 1}, "kept": 1.0}

and of a Trace besides

    "clock": {"unit": "us", "ticks": 1000}, "about": "predicted with costs 'unit'", "measured": false

`saved_unit` is in a layout whose `saved` counts something else than activations at the grain of cells, or bytes at the
grain of layers; `recomputed`, `dense_saved`, `stage_scale`, `mb_scale`, `tied`, `step_end` and `buckets` are where they
are not empty. Kinds of ops go by name, so that a file stays readable when a kind is added. Older files have `layers`,
and `embedding` and `head`, in place of `blocks`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treadle.fields.fields import Fields, Object
from treadle.fields.kinds import COUNT, SHARE, ListOf, Number, OneOf, Text
from treadle.ir.clock_units import CLOCK_UNITS
from treadle.ir.ops import OpKind
from treadle.ir.placement import MOST_CHUNKS, Placement
from treadle.ir.program import SAVED_UNITS, Layout
from treadle.ir.schedule import MOST_MICROBATCHES
from treadle.ir.trace import Clock, Trace

VERSION = 1
"""Version of both file forms; a reader takes its own version only."""

TIMING_KEYS = ("clock", "about", "measured")

_LAYOUT_KEYS = ("placement", "num_mb", "forward", "backward", "weights", "ep", "dp", "saved", "kept")
_FORMER = ("layers", "embedding", "head")  # what files of before there were blocks have
_KINDS = ("recomputed", "step_end")
_SCALES = ("stage_scale", "mb_scale")
_LATER = ("blocks", *_FORMER, "saved_unit", *_KINDS, *_SCALES, "dense_saved", "tied", "buckets")
_MOST_RANKS = int(np.iinfo(np.int32).max)  # a lane's rank is an int32
_MOST_LAYERS = int(np.iinfo(np.int16).max)  # an op's layer is an int16
_SCALE = ListOf(Number(0, 1e12, above=True, below=True))
_ROWS = ListOf(ListOf(COUNT, least=1))
_OP_KINDS = ListOf(OneOf(tuple(OpKind.__members__), "a kind of op:"))


class Timing(NamedTuple):
    """The clock and the origin of a Trace's times."""

    clock: Clock
    about: str
    measured: bool


def layout_object(layout: Layout) -> Object:
    """All of a Layout."""
    placement = layout.placement
    return {
        "placement": {"name": placement.name, "stages": placement.stages, "pipes": placement.pipes},
        "num_mb": layout.num_mb,
        "blocks": layout.blocks,
        "forward": [kind.name for kind in layout.forward],
        "backward": [kind.name for kind in layout.backward],
        "weights": [kind.name for kind in layout.weights],
        "ep": layout.ep,
        "dp": layout.dp,
        "saved": {kind.name: size for kind, size in layout.saved.items()},
        "kept": layout.kept,
        **({"saved_unit": layout.saved_unit} if layout.saved_unit != _usual_unit(layout.forward) else {}),
        **{name: value for name, value in _besides(layout).items() if value},
    }


def _besides(layout: Layout) -> Object:
    """What most layouts do not have."""
    return {
        "recomputed": [kind.name for kind in layout.recomputed],
        "dense_saved": {kind.name: size for kind, size in layout.dense_saved.items()},
        "stage_scale": layout.stage_scale,
        "mb_scale": layout.mb_scale,
        "tied": layout.tied,
        "step_end": [kind.name for kind in layout.step_end],
        "buckets": layout.buckets,
    }


def former_keys(layout: Layout) -> Object:
    """What older files say in place of blocks."""
    return {"layers": layout.layers, "embedding": layout.embedding, "head": layout.head}


def timing_object(trace: Trace) -> Object:
    """Return the fields of a Trace besides its Program and its times, as a JSON object."""
    clock = {"unit": trace.clock.unit, "ticks": trace.clock.ticks}
    return {"clock": clock, "about": trace.about, "measured": trace.measured}


def check_version(fields: Fields) -> None:
    """Refuse what another version wrote before anything of it is looked at."""
    version = fields.content.get("version")
    if type(version) is not int or version != VERSION:
        raise fields.error("version", f"{VERSION}, the one that this treadle reads", version)


def read_layout(fields: Fields) -> Layout:
    """The Layout that `layout_object` wrote."""
    fields.expect((*_LAYOUT_KEYS, "blocks" if "layers" not in fields else "layers"), _LATER)
    placement = _placement(fields.inner("placement"))
    forward = _kinds(fields, "forward")
    try:
        layout = Layout(
            placement=placement,
            num_mb=fields.whole("num_mb", 1, MOST_MICROBATCHES),
            blocks=_blocks(fields, placement.num_stages),
            forward=forward,
            backward=_kinds(fields, "backward"),
            weights=_kinds(fields, "weights"),
            ep=fields.whole("ep", 1, _MOST_RANKS),
            dp=fields.whole("dp", 1, _MOST_RANKS),
            saved=_saved(fields.inner("saved")),
            kept=float(fields.get("kept", SHARE)),
            saved_unit=_saved_unit(fields, forward),
            dense_saved=_saved(fields.inner("dense_saved")) if "dense_saved" in fields else {},
            tied=_tied(fields),
            buckets=_buckets(fields),
            recomputed=_kinds(fields, "recomputed") if "recomputed" in fields else (),
            step_end=_kinds(fields, "step_end") if "step_end" in fields else (),
            **{name: tuple(map(float, fields.get(name, _SCALE))) for name in _SCALES if name in fields},
        )
    except ValueError as error:
        prefix = "" if str(error).startswith(fields.source) else f"{fields.source}: {fields.where}: "
        raise ValueError(f"{prefix}{error}") from None
    if layout.num_ranks > _MOST_RANKS:
        raise fields.error("ep", f"a size that makes at most {_MOST_RANKS} ranks", layout.ep)
    return layout


def _blocks(fields: Fields, num_stages: int) -> tuple[str, ...]:
    """The blocks of each stage; in older files their numbers."""
    if "blocks" in fields and "layers" in fields:
        raise ValueError(f"{fields.source}: {fields.where}.layers stands beside blocks; a file has one of the two")
    if "blocks" in fields:
        rows = tuple(fields.get("blocks", ListOf(Text())))
        if len(rows) != num_stages:
            raise fields.error("blocks", f"a text for each of the {num_stages} stages", list(rows))
        if any(len(row) > _MOST_LAYERS for row in rows):
            raise fields.error("blocks", f"at most {_MOST_LAYERS} blocks in a stage", max(map(len, rows)))
        return rows
    layers = fields.wholes("layers", 0, _MOST_LAYERS)
    if len(layers) != num_stages:
        raise fields.error("layers", f"a number for each of the {num_stages} stages", list(layers))
    if min(layers) == 0 < max(layers):
        raise fields.error("layers", "0 for every stage (the grain of cells) or at least 1 for each", list(layers))
    made = ["t" * count for count in layers]
    known = layers[0] > 0
    embedding, head = (known and name in fields and fields.flag(name) for name in ("embedding", "head"))
    made[0] = "E" * embedding + made[0]
    made[-1] += "L" * head
    return tuple(made)


def _tied(fields: Fields) -> tuple[tuple[int, ...], ...]:
    if "tied" not in fields:
        return ()
    return tuple(map(tuple, fields.get("tied", _ROWS)))


def _buckets(fields: Fields) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, fields.get("buckets", _ROWS))) if "buckets" in fields else ()


def read_timing(fields: Fields) -> Timing:
    """Read the object that `timing_object` wrote."""
    clock = fields.inner("clock")
    clock.expect(("unit", "ticks"))
    unit = clock.text("unit")
    if unit not in CLOCK_UNITS:
        raise clock.error("unit", f"one of {', '.join(CLOCK_UNITS)}", unit)
    return Timing(Clock(unit, clock.whole("ticks", 1, 2**53)), fields.text("about"), fields.flag("measured"))


def _placement(fields: Fields) -> Placement:
    fields.expect(("name", "stages", "pipes"))
    name, pipes = fields.text("name"), fields.wholes("pipes")
    if len(pipes) > MOST_CHUNKS or max(pipes) >= len(pipes):
        raise fields.error("pipes", f"a pipe for each of at most {MOST_CHUNKS} chunks, numbered from 0", list(pipes))
    if not name.isprintable():
        raise fields.error("name", "one line of printable text", name)
    stages = tuple(map(tuple, fields.get("stages", _ROWS)))
    try:
        return Placement(name, stages, pipes)
    except ValueError as error:
        prefix = "" if str(error).startswith(fields.source) else f"{fields.source}: {fields.where}: "
        raise ValueError(f"{prefix}{error}") from None


def _kinds(fields: Fields, key: str) -> tuple[OpKind, ...]:
    return tuple(OpKind[name] for name in fields.get(key, _OP_KINDS))


def _usual_unit(forward: tuple[OpKind, ...]) -> str:
    """The unit of what is saved that goes without saying, as it did before there were others."""
    return "activations" if OpKind.F in forward else "bytes"


def _saved_unit(fields: Fields, forward: tuple[OpKind, ...]) -> str:
    if "saved_unit" not in fields:
        return _usual_unit(forward)
    unit: str = fields.get("saved_unit", OneOf(tuple(SAVED_UNITS), "a unit of what is saved:"))
    return unit


def _saved(fields: Fields) -> dict[OpKind, int]:
    fields.expect((), OpKind.__members__)
    return {OpKind[name]: fields.whole(name) for name in fields.content}
