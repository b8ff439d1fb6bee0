"""Several traces on one time scale, each with its memory below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle.ir.trace import Trace
from treadle.view.boxes import Boxes, Grid, cell_boxes
from treadle.view.frame import (
    LEFT,
    RIGHT,
    checked_grain,
    checked_ranks,
    described,
    end_of,
    put_about,
    put_title,
    width_for,
)
from treadle.view.held import Held, MemoryUnit, held, memory_unit
from treadle.view.labels import fit
from treadle.view.palette import palette
from treadle.view.parts import entries, legend, memory_lines, put_block, time_axis
from treadle.view.sheet import Scale, Sheet, checked_path


@dataclass(frozen=True, eq=False)
class _Block:
    title: str
    trace: Trace
    boxes: Boxes
    curves: list[Held]
    unit: MemoryUnit

    @property
    def peak(self) -> float:
        return max((curve.peak for curve in self.curves), default=0.0)

    @property
    def facts(self) -> str:
        unit = "units" if self.trace.clock.unit == "unit" else self.trace.clock.unit
        return f"{end_of(self.trace):g} {unit}, at most {self.unit.show(self.peak)} {self.unit.name} held"


def compare_figure(
    traces: Sequence[Trace],
    path: str | Path,
    *,
    titles: Sequence[str] | None = None,
    palette_name: str = "kimi",
    title: str | None = None,
    units: Sequence[MemoryUnit] | None = None,
) -> None:
    """Draws traces at the grain of cells above each other; the longest sets the time scale.

    `units` are what each trace's memory is counted in, where the chunks of one are larger than those of another.
    """
    target, colours = checked_path(path), palette(palette_name)
    blocks = _blocks(traces, titles, units)
    end = max(end_of(block.trace) for block in blocks)
    sheet = Sheet(LEFT + max(width_for(block.boxes, end, 9.5) for block in blocks) + RIGHT)
    per_unit = (sheet.width - LEFT - RIGHT) / end
    if title is not None:
        put_title(sheet, title)
    most = max(block.peak for block in blocks) or 1.0
    size = min(fit(block.boxes, per_unit).size for block in blocks)
    for block in blocks:
        scale = Scale(LEFT, 0.0, per_unit)
        put_block(sheet, block.boxes, colours, scale, name=block.title, facts=block.facts, by_lane=False, sizes=[size])
        memory_lines(sheet, block.curves, Scale(LEFT, 0.0, per_unit), most, block.unit, end)
    time_axis(sheet, Scale(LEFT, 0.0, per_unit), end, traces[0].clock.unit)
    legend(sheet, LEFT, (entry for block in blocks for entry in entries(block.trace, block.boxes, colours)))
    abouts = dict.fromkeys(trace.about for trace in traces if trace.about)
    put_about(sheet, " ".join([*abouts, "Memory: a line a device, the highest dark, its peak marked."]), LEFT)
    sheet.save(target)


def _blocks(traces: Sequence[Trace], titles: Sequence[str] | None, units: Sequence[MemoryUnit] | None) -> list[_Block]:
    if not traces:
        raise ValueError("a comparison needs at least one trace, got none")
    if len({trace.clock for trace in traces}) > 1:
        raise ValueError("traces on one time scale need one unit of time; simulate them with costs in the same unit")
    blocks = []
    for i, trace in enumerate(traces):
        checked_grain(trace, "cells")
        ranks = checked_ranks(trace, None)
        unit = units[i] if units is not None else memory_unit(trace)
        name = titles[i] if titles is not None else described(trace)
        blocks.append(_Block(name, trace, cell_boxes(trace, ranks, Grid(10.5, 1)), held(trace, ranks, unit), unit))
    return blocks
