"""The targeted plan: each bucket goes from its source to the one device that takes all of it.

In each step a device sends at most one bucket and receives at most one. Buckets are about of one size, and a step takes
those pairs first of which a device has most left to send or receive. With pairs that are all alike that is a rotation,
in which source i sends to taker i + k in turn k. What stays on its device moves first, without a link. A pair has a few
buckets, so that packing, sending and loading overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from treadle.weights.buffer_sizes import Memory, aligned, choose_buffers
from treadle.weights.bundles import Bundle, Ranks, Unit, make_bundles, size_in_bucket
from treadle.weights.collecting import uncollected
from treadle.weights.match import MatchedBox, Matcher
from treadle.weights.tensor_boxes import Holding, Piece
from treadle.weights.update_plan import Bucket, Item, UpdatePlan, by_tensor, moved, shared_of, units_of

A_PAIR = 4
"""Buckets that a pair of devices has about, where they are not smaller than `Memory.least_bytes` then."""

MOST_TAKES = 4_000_000
"""Boxes that all devices together take of all tensors. Beyond, the plan itself would take minutes."""


MOST_MATCHED = 1024
"""Pairs of devices whose steps are chosen by what is left; beyond, all rotate."""

Pair = tuple[int, int]
"""A source and a taker."""


class UntargetedError(ValueError):
    """No targeted plan can be made here, and broadcasts can."""


def plan_targeted(have: Holding, want: Holding, memory: Memory, only: Collection[str] | None = None) -> UpdatePlan:
    """Plan as `plan_update` does, with a destination for each bucket. Raises UntargetedError where there is no room."""
    with uncollected():
        return _plan(have, want, memory, only)


def _plan(have: Holding, want: Holding, memory: Memory, only: Collection[str] | None) -> UpdatePlan:
    tensors, matcher = moved(have, want, only), Matcher()
    wanted, wanting = by_tensor(want, tensors, matcher)
    units = units_of(have, want, tensors, wanted, matcher)
    parts = _parts(units, wanted, len(wanting))
    num_takes = sum(len(part) * len(takers) for part, takers in zip(parts, wanting, strict=True))
    if num_takes > MOST_TAKES:
        raise UntargetedError(f"broadcasts: devices take {num_takes} boxes, targeted plans have {MOST_TAKES} at most")
    most_bytes = max((sum(size_in_bucket(u.tensor, u.part.box) for u in part) for part in parts), default=0)
    sources = sorted({rank for unit in units for rank in unit.ranks})
    even_bytes = max(memory.least_bytes, aligned(most_bytes // max(1, len(sources) * A_PAIR)))
    buffers = choose_buffers(memory, even_bytes)
    if not buffers.num_h2d:
        raise UntargetedError("broadcasts: a device has no room for a buffer to send from and one to receive into")
    load = [0] * len(have.pieces)
    chosen: dict[Pair, list[Bundle]] = {}
    notes: dict[str, None] = {}
    for part, takers in zip(parts, wanting, strict=True):
        bundles, said = make_bundles(part, buffers.limit_bytes, buffers.limit_bytes)
        notes.update(dict.fromkeys(said))
        for taker in takers if bundles else ():
            for source, some in _chosen(bundles, taker, load).items():
                chosen[source, taker] = some
    limit = min(buffers.limit_bytes, max([memory.least_bytes, *map(_share, chosen.values())]))
    buckets = _in_steps({pair: _filled(some, limit) for pair, some in chosen.items()})
    num_ipc = min(buffers.num_ipc, max(1, len(buckets)))
    largest = max((bucket.size_bytes for bucket in buckets), default=0)
    told = (*buffers.notes, *notes)
    return UpdatePlan(tensors, buckets, (), largest, buffers.num_h2d, num_ipc, told, len(want.pieces), shared_of(units))


def _parts(units: Sequence[Unit], wanted: dict[str, dict[int, list[int]]], num_classes: int) -> list[list[Unit]]:
    """For each class of takers, what it takes: boxes apart from each other, with the ranks that have them."""
    parts: list[list[Unit]] = [[] for _ in range(num_classes)]
    for unit in units:
        classes = list(wanted[unit.tensor.name].values())
        for index, box in unit.part.takes:
            taken: Unit | None = None
            for number in classes[index]:
                if taken is None:
                    taken = Unit(unit.tensor, MatchedBox(box, unit.part.had_in, ((index, box),)), unit.ranks)
                parts[number].append(taken)
    return parts


def _chosen(bundles: Sequence[Bundle], taker: int, load: list[int]) -> dict[int, list[Bundle]]:
    """Bundles by source: the taker's own device, else whoever has least to send; `load` counts bytes sent."""
    source = [-1] * len(bundles)
    free: list[int] = []
    for i, bundle in enumerate(bundles):
        if taker in bundle.ranks:
            source[i] = taker
        elif len(bundle.ranks) == 1:
            source[i] = bundle.ranks[0]
            load[source[i]] += bundle.size_bytes
        else:
            free.append(i)
    turned: dict[Ranks, Ranks] = {}
    for i in sorted(free, key=lambda i: -bundles[i].size_bytes):
        bundle = bundles[i]
        if bundle.ranks not in turned:  # takers begin with different sources
            at = taker % len(bundle.ranks)
            turned[bundle.ranks] = bundle.ranks[at:] + bundle.ranks[:at]
        source[i] = min(turned[bundle.ranks], key=load.__getitem__)
        load[source[i]] += bundle.size_bytes
    chosen: dict[int, list[Bundle]] = {}
    for rank, bundle in zip(source, bundles, strict=True):
        chosen.setdefault(rank, []).append(bundle)
    return chosen


def _share(bundles: Sequence[Bundle]) -> int:
    return aligned(-(-sum(bundle.size_bytes for bundle in bundles) // A_PAIR))


def _filled(bundles: Sequence[Bundle], limit_bytes: int) -> list[list[Bundle]]:
    """Bundles in their order, as many to a bucket as fit; a larger bundle is a bucket by itself."""
    filled: list[list[Bundle]] = []
    room = -1
    for bundle in bundles:
        if bundle.size_bytes > room:
            filled.append([])
            room = limit_bytes
        filled[-1].append(bundle)
        room -= bundle.size_bytes
    return filled


def _in_steps(pairs: dict[Pair, list[list[Bundle]]]) -> tuple[Bucket, ...]:
    """Buckets in the order of their steps; those that stay on their device come first."""
    sources = {rank: place for place, rank in enumerate(sorted({source for source, _ in pairs}))}
    takers = {rank: place for place, rank in enumerate(sorted({taker for _, taker in pairs}))}
    both = max(len(sources), len(takers), 1)
    turn = {(s, t): (takers[t] - sources[s]) % both for s, t in pairs}
    apart = {pair: buckets for pair, buckets in pairs.items() if pair[0] != pair[1]}
    order = [(pair, j) for pair in sorted(pairs.keys() - apart.keys()) for j in range(len(pairs[pair]))]
    if len(apart) > MOST_MATCHED:
        order += [
            (pair, j) for pair in sorted(apart, key=lambda pair: (turn[pair], pair)) for j in range(len(pairs[pair]))
        ]
    else:
        order += _matched(apart, turn)
    made: list[Bucket] = []
    turns = dict.fromkeys(sources, 0)
    for (source, taker), j in order:
        made.append(_bucket(turns[source], source, taker, pairs[source, taker][j]))
        turns[source] += 1
    return tuple(made)


def _matched(pairs: dict[Pair, list[list[Bundle]]], turn: dict[Pair, int]) -> list[tuple[Pair, int]]:
    """Step by step the pairs that have most left at one of their ends, as far as both ends are free."""
    left = {pair: [sum(bundle.size_bytes for bundle in bundles) for bundles in some] for pair, some in pairs.items()}
    out, into = dict[int, int](), dict[int, int]()
    for (source, taker), sizes in left.items():
        out[source] = out.get(source, 0) + sum(sizes)
        into[taker] = into.get(taker, 0) + sum(sizes)
    order: list[tuple[Pair, int]] = []
    while left:
        busy, full = set[int](), set[int]()
        by_need = sorted(left, key=lambda pair: (-max(out[pair[0]], into[pair[1]]), turn[pair], pair))
        for source, taker in by_need:
            if source in busy or taker in full:
                continue
            busy.add(source)
            full.add(taker)
            sizes = left[source, taker]
            order.append(((source, taker), len(pairs[source, taker]) - len(sizes)))
            size = sizes.pop(0)
            out[source] -= size
            into[taker] -= size
            if not sizes:
                del left[source, taker]
    return order


def _bucket(turn: int, source: int, dest: int, bundles: Sequence[Bundle]) -> Bucket:
    items, offset = [], 0
    for bundle in bundles:
        for unit, box in bundle.pieces:
            items.append(Item(Piece(unit.tensor.name, box), offset))
            offset += size_in_bucket(unit.tensor, box)
    return Bucket(source, turn, tuple(items), offset, (dest,))
