"""Which rank each bundle comes from, and which bucket of that rank it is in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.ir.program import Longs
from treadle.weights.bundles import Bundle, Ranks


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
    bundles: Sequence[Bundle], source: Sequence[int], num_ranks: int, limit_bytes: int
) -> list[tuple[int, int, list[Bundle]]]:
    """(round, source, bundles) in the order of broadcast: round by round, in a round the sources in turn.

    A source's bundles keep their order, so that tensors of one layer arrive close to each other.
    """
    rows: list[list[list[Bundle]]] = [[] for _ in range(num_ranks)]
    room = [0] * num_ranks
    for bundle, rank in zip(bundles, source, strict=True):
        if bundle.size_bytes > room[rank]:
            rows[rank].append([])
            room[rank] = limit_bytes
        rows[rank][-1].append(bundle)
        room[rank] -= bundle.size_bytes
    filled = [(turn, rank, bucket) for rank, row in enumerate(rows) for turn, bucket in enumerate(row)]
    return sorted(filled, key=lambda entry: entry[:2])
