"""The step of a plan as a small picture in HTML: what each rank of the pipeline computes, with its key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.ir.ops import OpKind
from treadle.ir.trace import Trace
from treadle.planner.planned_step import PlannedStep
from treadle.view.page.preview import shown_lanes, small_picture
from treadle.view.palette import ROLE_OF, Palette, Role, palette

_SLOTS = 8
"""Micro-batches of the part of a step that is drawn, besides those that fill the pipeline."""
_COLUMNS = 1440


def step_picture(chosen: PlannedStep) -> str:
    """Return the step as a small picture, a row for each rank of the pipeline: all of it, or what repeats once."""
    trace, job, colours = chosen.trace, chosen.estimate.job, palette("kimi")
    share = min(1.0, (job.pp + _SLOTS) / (job.num_microbatches + job.pp))
    lanes = shown_lanes(trace)
    height = min(22, max(5, 320 // len(lanes)))
    last = f"<span>rank {len(lanes) - 1}</span>" if len(lanes) > 1 else ""
    picture = small_picture([(trace, lane) for lane in lanes], colours, round(trace.makespan * share), _COLUMNS)
    part = "The whole step." if share == 1 else f"The first {share:.0%} of the step, before it repeats itself."
    return (
        f'<div class="step" style="height:{height * len(lanes)}px" role="img" aria-label="What each rank computes over '
        f'time"><span class="ends"><span>rank 0</span>{last}</span>{picture}</div>'
        f'<div class="step-axis"><span>0 s</span><span>{chosen.step_s * share:.3f} s</span></div>'
        f'<ul class="key">{_key(trace, lanes, colours)}</ul>'
        f'<p class="note">{part} {chosen.metrics.idle_share:.1%} of the step is idle, mean over ranks.</p>'
    )


def _key(trace: Trace, lanes: Sequence[int], colours: Palette) -> str:
    """Return the colours of what ranks compute, of a first chunk and of later ones where there are any."""
    program = trace.program
    ops = np.concatenate([np.arange(program.lane_ptr[lane], program.lane_ptr[lane + 1]) for lane in lanes])
    ops = ops[trace.end[ops] > trace.start[ops]]
    used = {ROLE_OF[OpKind(kind)] for kind in np.unique(program.kind[ops]).tolist()}
    chunks = bool((program.chunk[ops] > 0).any())
    key = []
    for role in (role for role in Role if role in used):
        later = colours[role].later if chunks else ""
        swatches = "".join(f'<i style="background:{fill}"></i>' for fill in (colours[role].fill, later) if fill)
        key.append(f"<li>{swatches}{role}{' (darker: later chunks)' if later else ''}</li>")
    return "".join([*key, '<li><i class="idle"></i>idle</li>'])
