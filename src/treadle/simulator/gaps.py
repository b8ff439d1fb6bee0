"""What passes between measured ops: the gap before an op whose rank waits for nobody, and the time of a message.

    start of an op  =  latest of (end of the op before it on its rank, end of its input's maker + message) + gap

A gap is launches, and communication that computation waits for. A message takes what passes, besides that gap, from
where its maker ends to where a waiting reader starts; so it needs no record of the message itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treadle.ir.crossings import crossings
from treadle.ir.ops import ACTIONS as ACTION_OPS
from treadle.ir.ops import MESSAGES, LaneKind
from treadle.ir.program import Bools, Longs
from treadle.ir.steps import Steps

ACTIONS = (*(kind.cost_key for kind in ACTION_OPS), "fb")
"""What a stage does with a micro-batch; all but the last are the first kinds of ops."""
PAIR = ACTIONS.index("fb")
"""The action of an overlapped pair."""


class Gaps(NamedTuple):
    """The computations of a step, an entry each; the gap before each in ticks, and what a message takes.

    `op` is the first of an overlapped pair. `action` is an index of ACTIONS. All ops of a stage and action have the
    same gap: the median of those that waited for nobody, of all stages where none did. `message` is None where no op
    waited for one.
    """

    op: Longs
    stage: Longs
    action: Longs
    gap: npt.NDArray[np.float64]
    message: int | None


def find_gaps(steps: Steps, factors: npt.NDArray[np.float64] | None = None) -> Gaps:
    """Find the gaps before computations, and the time of a message, in measured steps at the grain of cells.

    `factors[micro-batch]` is how many times as long as the usual one its messages take.
    """
    program = steps.program
    placement = program.layout.placement
    computes = (program.lane_kind[program.lane_of] == LaneKind.COMPUTE) & np.isin(program.kind, ACTION_OPS)
    op = np.flatnonzero(computes & ~program.joined)
    pairs = np.r_[program.joined, False]
    action = np.where(pairs[op + 1], PAIR, program.kind[op]).astype(np.int64)
    pp = program.lane_rank[program.lane_of][op] // program.layout.num_replicas
    stage = np.array(placement.stages, np.int64)[pp, program.chunk[op]]
    free, made = _waited_for(steps, op)
    waited = (made > free) & (free >= 0)
    delay = steps.start[:, op] - np.maximum(made, free)
    usual = float(np.median(delay[waited])) if waited.any() else 0.0
    alone = (free >= 0) & (free - made > usual)
    gap = _medians(delay, alone, stage, action)
    moved = delay - gap if factors is None else (delay - gap) / factors[microbatches(steps, op)]
    message = max(0, round(float(np.median(moved[waited])))) if waited.any() else None
    return Gaps(op, stage, action, gap, message)


def microbatches(steps: Steps, op: Longs) -> Longs:
    """Return the number of each op's micro-batch in the step, pipe after pipe."""
    program = steps.program
    first = np.array(program.layout.placement.pipes, np.int64) * program.layout.num_mb
    return np.asarray(first[program.chunk[op]] + program.mb[op], np.int64)


def own_durations(steps: Steps) -> Longs:
    """`[step, op]`: what each op took itself, with the gap before it; a message takes what messages do.

    Simulated, a step is as long as it was but for what these leave unexplained.
    """
    gaps, program = find_gaps(steps), steps.program
    took = steps.end - steps.start
    took[:, np.isin(program.kind, MESSAGES)] = gaps.message or 0
    took[:, gaps.op] += np.rint(gaps.gap).astype(np.int64)
    return took


def _waited_for(steps: Steps, op: Longs) -> tuple[Longs, Longs]:
    """`[step, computation]`: when its rank had ended the computation before, and when its input was made; or -1."""
    program = steps.program
    free = np.full(steps.start.shape, -1, np.int64)
    after = op[1:][program.lane_of[op[1:]] == program.lane_of[op[:-1]]]
    free[:, after] = steps.end[:, after - 1]
    made = np.full_like(free, -1)
    found = crossings(program)
    for maker, reader in zip(found.maker, found.reader, strict=True):
        made[:, reader] = np.maximum(made[:, reader], steps.end[:, maker])
    for second in np.flatnonzero(program.joined):  # a pair waits for the inputs of both
        made[:, second - 1] = np.maximum(made[:, second - 1], made[:, second])
    return free[:, op], made[:, op]


def _medians(delay: Longs, chosen: Bools, stage: Longs, action: Longs) -> npt.NDArray[np.float64]:
    """`[computation]`: the median of the chosen delays of its stage and action, or of all its likes where none is."""
    gap = np.full(len(stage), np.nan)
    for group in (stage * len(ACTIONS) + action, action, np.zeros_like(action)):
        for each in np.unique(group[np.isnan(gap)]):
            members = group == each
            found = delay[:, members][chosen[:, members]]
            if len(found):
                gap[members & np.isnan(gap)] = max(0.0, float(np.median(found)))
    return np.where(np.isnan(gap), 0.0, gap)
