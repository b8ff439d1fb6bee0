"""A trace as one HTML file that works without a network: zoom, pan, what waits for what, the critical path, memory.

The file is `page.html` with the style, the scripts and the columns of the traces put in. Its content security policy
forbids every request, so that what it shows cannot depend on a server, nor leave the machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from treadle.ir.memory import changes, per_unit
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import Lane, Longs, Op, Program
from treadle.ir.trace import Trace
from treadle.simulator import Metrics, PathSummary, critical_path, measure, summarize_path
from treadle.view.described import described
from treadle.view.page.packed_columns import column, columns
from treadle.view.page.preview import preview
from treadle.view.palette import NAMES, ROLE_OF, Palette, Role, palette
from treadle.view.template import fill_template

SCRIPTS = ("trace.js", "paint.js", "memory.js", "details.js", "page.js")
"""In the order they are put in: each uses the ones before."""

MOST_OPS = 2_000_000
"""Of all traces of a page: so many take 1.5 s to the first paint and 50 ms a pan step, without a GPU."""


def page(traces: Sequence[tuple[str, Trace]], palette_name: str = "kimi", *, title: str | None = None) -> str:
    """The HTML of one trace, or of two above each other on one time axis, each with its name.

    Without a title it has their names, and the size of the step.
    """
    _check(traces)
    colours = palette(palette_name)
    data = {
        "roles": [{"name": role, "looks": _looks(colours, role)} for role in Role],
        "kinds": [_kind(kind) for kind in OpKind],
        "traces": [_trace(name, trace) for name, trace in traces],
    }
    heading = title if title is not None else _title(traces)
    here = files("treadle.view.page")
    style = here.joinpath("page.css").read_text(encoding="utf-8")
    script = "\n".join(here.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    # A script ends at the first "</script" inside it, whatever the names of the traces say: no "<" stays in the data.
    shipped = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    titles = "".join(
        f"<div><b>{escape(name)}</b> <span>{escape(described(trace))}</span></div>" for name, trace in traces
    )
    parts = {
        "title": escape(heading),
        "titles": titles,
        "preview": preview([t for _, t in traces], colours),
        "style": style,
        "script": script,
        "data": shipped,
    }
    return fill_template("treadle.view.page", parts)


def _title(traces: Sequence[tuple[str, Trace]]) -> str:
    """The names, and the size of the step, once if it is the same."""
    sizes = dict.fromkeys(described(trace) for _, trace in traces)
    if len(sizes) > 1:
        return " and ".join(f"{name}: {described(trace)}" for name, trace in traces)
    return f"{' and '.join(name for name, _ in traces)}: {next(iter(sizes))}"


def _check(traces: Sequence[tuple[str, Trace]]) -> None:
    if not 1 <= len(traces) <= 2:
        raise ValueError(f"a page shows one trace or two, got {len(traces)}")
    for name, trace in traces:
        if not trace.program.num_ops:
            raise ValueError(f"{name!r} has no ops, so there is nothing to draw; simulate a schedule with some")
    clocks = [trace.clock for _, trace in traces]
    if clocks[0] != clocks[-1]:
        units = " and ".join(f"{name!r} counts in {trace.clock.unit}" for name, trace in traces)
        raise ValueError(f"two traces on one time axis need one clock, but {units}; simulate with other costs")
    num_ops = sum(trace.program.num_ops for _, trace in traces)
    if num_ops > MOST_OPS:
        raise ValueError(
            f"a page takes up to {MOST_OPS:,} ops, got {num_ops:,}; draw fewer micro-batches, or one pipeline of a mesh"
        )


def _looks(colours: Palette, role: Role) -> list[dict[str, str]]:
    """Of the first chunk, and of later ones; of a broadcast on its source."""
    second = colours[Role.SOURCE] if role is Role.BROADCAST else colours[role].of_later_chunk()
    return [{"fill": each.fill, "text": each.text, "hatch": each.hatch[:1]} for each in (colours[role], second)]


def _kind(kind: OpKind) -> dict[str, Any]:
    return {"text": _text(kind), "short": NAMES[kind], "role": list(Role).index(ROLE_OF[kind])}


def _text(kind: OpKind) -> str:
    """Return the text of an op of this kind, with {mb}, {chunk}, {layer} and {peer} where its numbers go.

    It is read off an op with numbers that stand out, so that how an op reads is said in one place.
    """
    mb, chunk, layer, peer = 1000001, 1000002, 1000003, 1000004
    text = str(Op(0, kind, Lane(0, LaneKind.COMPUTE, peer), mb, chunk, layer, 0))
    for name, number in (("mb", mb), ("chunk", chunk), ("layer", layer), ("peer", peer)):
        text = text.replace(str(number), f"{{{name}}}")
    return text


def _trace(name: str, trace: Trace) -> dict[str, Any]:
    """Times are in ticks: the page knows how to write them."""
    path = critical_path(trace)
    saves, taken, given = _saves(trace.program)
    unit, per = trace.program.layout.saved_unit, per_unit(trace.program.layout)
    return {
        "name": name,
        "size": described(trace),
        "about": trace.about,
        "unit": trace.clock.unit,
        "ticks": trace.clock.ticks,
        "makespan": trace.makespan,
        "twoWays": trace.program.layout.placement.num_pipes > 1,
        "byLayer": trace.program.layout.by_layer,
        "isUpdate": trace.program.layout.is_update,
        "lanes": _lanes(trace.program),
        "totals": _totals(measure(trace)),
        "path": _path(summarize_path(trace, path)),
        "savedUnit": " layers" if unit == "layers" else "",
        "taken": (taken / per).tolist(),
        "given": (given / per).tolist(),
        "columns": {**columns(trace, np.array(path, np.int64)), "saves": column(saves)},
    }


def _saves(program: Program) -> tuple[Longs, Longs, Longs]:
    """Return for each op a number, and for each number what such ops take and give back."""
    what, taken, given = changes(program)
    pairs, number = np.unique(np.stack([taken[what], given[what]]), axis=1, return_inverse=True)
    return number.reshape(-1), pairs[0], pairs[1]


def _lanes(program: Program) -> dict[str, list[Any]]:
    lanes = [program.lane(index) for index in range(program.num_lanes)]
    return {
        "ptr": program.lane_ptr.tolist(),
        "rank": program.lane_rank.tolist(),
        "name": [lane.name for lane in lanes],
        "peer": program.lane_peer.tolist(),
        "compute": [int(lane.kind in (LaneKind.COMPUTE, LaneKind.BROADCAST)) for lane in lanes],
        "group": program.lane_group.tolist(),
    }


def _path(path: PathSummary) -> dict[str, Any]:
    return {"numOps": path.num_ops, "length": path.length, "numHops": path.num_hops, "byKind": path.by_kind}


def _totals(metrics: Metrics) -> dict[str, Any]:
    return {
        "bubble": metrics.bubble,
        "exposed": metrics.exposed,
        "ranks": [
            {
                "busy": rank.busy,
                "idle": rank.idle,
                "bubble": rank.idle_share,
                "exposed": rank.communication.exposed,
                "peak": peak,
            }
            for rank, peak in zip(metrics.ranks, metrics.peaks, strict=True)
        ],
    }
