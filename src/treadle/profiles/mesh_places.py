"""Where each recorded rank stands: its place in the pipeline, and in which replica of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from treadle.ir.ops import ACTIONS
from treadle.profiles.recording import UNKNOWN, RankRecording, Recording

RankGrid = tuple[tuple[RankRecording, ...], ...]
"""`grid[pp][dp]`: the rank at that place of the pipeline in that replica."""


def place_ranks(recording: Recording) -> RankGrid:
    """Find the place of every rank: as the files say, else by the stages it computes, else by its number.

    Raises:
        ValueError: ranks are missing or double, or nothing shows their places.

    """
    ranks = [rank for rank in recording.ranks if len(rank)]
    if not ranks:
        raise ValueError(f"{_sources(recording.ranks)}: no forward and no backward is named in them")
    _refuse_doubles(ranks)
    columns: dict[int, list[RankRecording]] = defaultdict(list)
    for rank, place in zip(ranks, _places(ranks, recording), strict=True):
        columns[place].append(rank)
    pp = recording.pp if recording.pp is not None else 1 + max(columns)
    missing = [place for place in range(pp) if place not in columns]
    if missing:
        has = ", ".join(map(str, sorted(columns)))
        raise ValueError(
            f"missing profiles of pipeline rank{'s' if len(missing) > 1 else ''} {_listed(missing)}: the pipeline has "
            f"{pp} ranks, and the {len(ranks)} files are of {has}; add the missing ones"
        )
    dp = recording.dp if recording.dp is not None else max(map(len, columns.values()))
    for place, here in sorted(columns.items()):
        if len(here) != dp:
            raise ValueError(
                f"rank {place} of the pipeline is in {len(here)} files, and there are {dp} replicas; add the missing "
                f"ones, or give the files of one replica only"
            )
    return tuple(tuple(sorted(columns[place], key=lambda rank: (rank.dp, rank.rank))) for place in range(pp))


def _places(ranks: Sequence[RankRecording], recording: Recording) -> list[int]:
    if all(rank.pp != UNKNOWN for rank in ranks):
        return [rank.pp for rank in ranks]
    held = [_stages(rank) for rank in ranks]
    if all(held):
        lowest = sorted({min(stages) for stages in held})
        if recording.pp is None and lowest != list(range(len(lowest))):
            gap = next(place for place, stage in enumerate(lowest) if place != stage)
            raise ValueError(
                f"no file has a forward of stage {gap}: a rank of the pipeline is missing; the files have stages "
                f"{_listed(sorted(set().union(*held)))}"
            )
        if recording.dp is None:
            _refuse_two_directions(ranks, held)
        return [min(stages) for stages in held]
    if recording.pp is not None and all(rank.rank != UNKNOWN for rank in ranks):
        world = max(len(ranks), 1 + max(rank.rank for rank in ranks))
        if world % recording.pp == 0:
            return [rank.rank // (world // recording.pp) for rank in ranks]
        raise ValueError(f"{world} ranks do not divide into pipelines of {recording.pp}; give the files of all ranks")
    raise ValueError(
        f"{_sources(ranks)}: the pipeline rank of a file is unknown: neither its stages are named nor "
        "its rank; keep 'rank3' in the files' names"
    )


def _stages(rank: RankRecording) -> set[int]:
    compute = np.isin(rank.kind, ACTIONS)
    named = rank.stage[compute]
    return set() if (named == UNKNOWN).any() else set(np.unique(named).tolist())


def _refuse_two_directions(ranks: Sequence[RankRecording], held: Sequence[set[int]]) -> None:
    """Two ranks with the first and the last stage each are replicas of a V, or the two ends of DualPipe."""
    last = max(max(stages) for stages in held)
    ends = [rank for rank, stages in zip(ranks, held, strict=True) if stages == {0, last}]
    if len(ends) > 1 and last > 1:
        raise ValueError(
            f"{ends[0].source} and {ends[1].source} both have stages 0 and {last}: replicas of a V placement, or the "
            f"two directions of DualPipe, whose names are the same; for replicas give "
            f"`dp={len(ends)}`, for DualPipe Treadle's own trace"
        )


def _refuse_doubles(ranks: Sequence[RankRecording]) -> None:
    seen: dict[tuple[int, ...], RankRecording] = {}
    for rank in ranks:
        place = (rank.rank,) if rank.rank != UNKNOWN else (rank.pp, rank.dp)
        if UNKNOWN in place:
            continue
        if place in seen:
            raise ValueError(
                f"{seen[place].source} and {rank.source} are both of rank {_listed(place)}: two runs in one "
                "directory, or a copy; leave one of them out"
            )
        seen[place] = rank


def _sources(ranks: Sequence[RankRecording]) -> str:
    names = sorted({rank.source for rank in ranks})
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more" if names else "the files"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
