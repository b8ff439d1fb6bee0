"""Which rank of a pipeline, how many chunks, and where steps end, by the forwards that a rank runs ahead.

Megatron's ranges name neither rank nor micro-batch nor step. In its schedules a rank runs more forwards before its
first backward the earlier it is in the pipeline:

    1F1B           P - r                                forwards, of rank r
    interleaved    2 (P - 1 - r) + (V - 1) P + 1        of V chunks

On the first rank every forward of a step has begun before its last backward, and a step is over when all of them have
had their backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from treadle.ir.ops import ACTIONS, RECEIVES, OpKind
from treadle.ir.program import Bools, Ints
from treadle.profiles.recording import UNKNOWN, RankRecording

_BACKWARD = (OpKind.B, OpKind.I)


class Sized(NamedTuple):
    """Ranks with their places and steps, and the sizes of their pipeline."""

    ranks: tuple[RankRecording, ...]
    pp: int
    vpp: int
    dp: int
    num_mb: int


def size_by_warmup(ranks: Sequence[RankRecording]) -> Sized:
    """Find places, chunks, micro-batches and steps of ranks that ran one of Megatron's schedules.

    Raises:
        ValueError: the ranks did not; the message names one.

    """
    ahead = [_ahead(rank) for rank in ranks]
    levels = sorted(set(ahead), reverse=True)
    pp = len(levels)
    by_two = pp > 1 and levels[0] - levels[1] == 2
    if pp < 2 or {one - two for one, two in pairwise(levels)} != {2 if by_two else 1}:
        raise ValueError(
            f"{ranks[0].source}: the forwards before the first backward of each rank ({_listed(levels)}) are not those "
            "of one of Megatron's pipelines, and nothing else shows the ranks' places; give the files of all its "
            "ranks, of a step with more micro-batches than ranks"
        )
    vpp, rest = divmod(levels[-1] - 1, pp)
    if rest or (vpp and not by_two):
        raise ValueError(
            f"{ranks[0].source}: the last rank runs {levels[-1]} forwards before its first backward, and Megatron's "
            f"runs 1, or 1 more than a multiple of {pp}; give the files of all ranks"
        )
    first = ranks[ahead.index(levels[0])]
    if not vpp and (first.kind == OpKind.RECV_F).any():
        raise ValueError(f"{first.source}: receives forwards, so ranks before it are missing; give the files of all")
    places = [levels.index(each) for each in ahead]
    counts = [places.count(place) for place in range(pp)]
    if len(set(counts)) > 1:
        raise ValueError(f"the ranks of the pipeline are in {_listed(counts)} files; give as many of each")
    each = _forwards_of_a_step(ranks[places.index(0)])
    numbered = tuple(
        replace(_with_steps(rank, each), pp=place, dp=places[:at].count(place))
        for at, (rank, place) in enumerate(zip(ranks, places, strict=True))
    )
    return Sized(numbered, pp, vpp + 1, counts[0], each // (vpp + 1))


def _ahead(rank: RankRecording) -> int:
    """Forwards before the first backward."""
    backward = np.flatnonzero(np.isin(rank.kind, _BACKWARD))
    if not len(backward):
        raise ValueError(f"{rank.source}: has no backward; record whole steps")
    return int((rank.kind[: backward[0]] == OpKind.F).sum())


def _forwards_of_a_step(first: RankRecording) -> int:
    change = np.where(first.kind == OpKind.F, 1, np.where(np.isin(first.kind, _BACKWARD), -1, 0))
    done = np.flatnonzero((np.cumsum(change) == 0) & (change == -1))
    if not len(done):
        raise ValueError(f"{first.source}: not all forwards have a backward: no step is whole; record one at least")
    return int((first.kind[: done[0] + 1] == OpKind.F).sum())


def _with_steps(rank: RankRecording, each: int) -> RankRecording:
    """So many of a kind make a step; a receive is of the computation after it, a send of the one before."""
    step: Ints = np.full(len(rank), UNKNOWN, np.int32)
    for kind in ACTIONS:
        own = np.flatnonzero(rank.kind == kind)
        step[own] = np.arange(len(own)) // each
    computed: Bools = step != UNKNOWN
    steps = step[computed]
    for at, start in zip(np.flatnonzero(~computed), rank.start[~computed], strict=True):
        behind = int(np.searchsorted(rank.start[computed], start))
        step[at] = steps[min(behind, len(steps) - 1) if rank.kind[at] in RECEIVES else max(behind - 1, 0)]
    return replace(rank, step=step)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
