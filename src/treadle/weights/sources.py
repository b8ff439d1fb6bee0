"""Which rank each bundle comes from, and which bucket of that rank it is in: in the order of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from treadle.ir.program import Longs
from treadle.weights.buffer_sizes import Spread
from treadle.weights.bundles import Bundle, Ranks, Unit, size_in_bucket


def choose_sources(bundles: Sequence[Bundle], num_ranks: int, least_bytes: int) -> tuple[list[int], int]:
    """A rank for each bundle, so that all move about as many bytes; and the most that one moves.

    What only one rank has is settled first; of the rest the largest first, each to whoever has least so far. But who
    has less than `least_bytes` is filled up before another one starts: a broadcast takes time, however little it moves.
    """
    source = [-1] * len(bundles)
    load = np.zeros(num_ranks, np.int64)
    free = []
    for i, bundle in enumerate(bundles):
        if len(bundle.ranks) == 1:
            source[i] = bundle.ranks[0]
            load[bundle.ranks[0]] += bundle.size_bytes
        else:
            free.append(i)
    arrays: dict[Ranks, Longs] = {}
    for i in sorted(free, key=lambda i: -bundles[i].size_bytes):
        bundle = bundles[i]
        ranks = arrays.get(bundle.ranks)
        if ranks is None:
            ranks = arrays[bundle.ranks] = np.array(bundle.ranks, np.int64)
        loads = load[ranks]
        started = (loads > 0) & (loads < least_bytes)
        place = np.argmax(started * loads) if started.any() else np.argmin(loads)
        source[i] = int(ranks[place])
        load[source[i]] += bundle.size_bytes
    return source, int(load.max(initial=0))


def fill_buckets(
    bundles: Sequence[Bundle], source: Sequence[int], limit_bytes: int, window_bytes: int
) -> list[tuple[int, int, list[Bundle]]]:
    """(round, source, bundles) in the order of broadcast: round by round, in a round the sources in turn.

    Buckets of all sources end at the same tensors, every `window_bytes`: what engines assemble from parts of several
    sources, and layers that they hold until they are complete, are at most a window, or one tensor that is larger.
    """
    filled: list[tuple[int, int, list[Bundle]]] = []
    begin = 0
    for window in _windows([(_name(bundle), bundle.size_bytes) for bundle in bundles], window_bytes):
        rows: dict[int, list[list[Bundle]]] = {}
        room: dict[int, int] = {}
        for at in window:
            bundle, rank = bundles[at], source[at]
            if bundle.size_bytes > room.get(rank, 0):
                rows.setdefault(rank, []).append([])
                room[rank] = limit_bytes
            rows[rank][-1].append(bundle)
            room[rank] -= bundle.size_bytes
        found = [(begin + turn, rank, bucket) for rank, row in rows.items() for turn, bucket in enumerate(row)]
        filled += sorted(found, key=lambda entry: entry[:2])
        begin += max(map(len, rows.values()), default=0)
    return filled


def spread_of(units: Sequence[Unit], window_bytes: int) -> Spread:
    """Return the largest window, and the most of one that the same ranks have: 1 / 64 of tensors in 64 shards."""
    sizes = [(unit.tensor.name, size_in_bucket(unit.tensor, unit.part.box)) for unit in units]
    share = 0.0
    for window in _windows(sizes, window_bytes):
        of_ranks: dict[Ranks, int] = {}
        for at in window:
            of_ranks[units[at].ranks] = of_ranks.get(units[at].ranks, 0) + sizes[at][1]
        total = sum(of_ranks.values())
        share = max(share, max(of_ranks.values()) / total)
        window_bytes = max(window_bytes, total)
    return Spread(window_bytes, share or 1.0)


def _name(bundle: Bundle) -> str:
    tensor = bundle.pieces[0][0].tensor
    return tensor.family or tensor.name


def _windows(sizes: Sequence[tuple[str, int]], window_bytes: int) -> Iterator[range]:
    """Yield ranges of parts, given by tensor and size, each of whole tensors up to so many bytes."""
    begin, used, at = 0, 0, 0
    for _, parts in itertools.groupby(sizes, key=lambda part: part[0]):
        some = [size for _, size in parts]
        if used and used + sum(some) > window_bytes:
            yield range(begin, at)
            begin, used = at, 0
        at += len(some)
        used += sum(some)
    if at > begin:
        yield range(begin, at)
