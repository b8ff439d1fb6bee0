"""The targeted plan: each bucket goes from its source to those devices alone that take all of it, one after the other.

In each step a device sends at most one bucket and receives at most one. Buckets are about of one size, and a step takes
those pairs first of which a device has most left to send or receive. With pairs that are all alike that is a rotation,
in which source i sends to taker i + k in turn k. What stays on its device moves first, without a link. A pair has a few
buckets, so that packing, sending and loading overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from treadle.weights.buffer_sizes import Memory, aligned, choose_buffers
from treadle.weights.bundles import Bundle, Ranks, Unit, make_bundles, size_in_bucket
from treadle.weights.collecting import uncollected
from treadle.weights.match import MatchedBox, Matcher
from treadle.weights.matched_steps import matched_steps
from treadle.weights.tensor_boxes import Holding, Piece
from treadle.weights.update_plan import Bucket, Item, UpdatePlan, by_tensor, moved, shared_of, units_of

A_PAIR = 4
"""Buckets that a source has about for those that take alike, where they are not smaller than `Memory.least_bytes`."""

A_HOP = 32
"""Buckets that a device at the end of a chain receives about for each hop before: the first passes all of them."""

MOST_TAKES = 4_000_000
"""Boxes that all devices together take of all tensors. Beyond, the plan itself would take minutes."""


MOST_MATCHED = 1024
"""Pairs of devices whose steps are chosen by what is left; beyond, all rotate."""

Route = tuple[int, ...]
"""A source and those that take what it sends, in order."""


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
    num_sources = max(1, len({rank for unit in units for rank in unit.ranks}))
    hops = max((len(takers) for part, takers in zip(parts, wanting, strict=True) if part), default=1) - 1
    each = max(A_PAIR, -(-A_HOP * hops // num_sources))
    even_bytes = max(memory.least_bytes, aligned(most_bytes // (num_sources * each)))
    buffers = choose_buffers(memory, even_bytes)
    if not buffers.num_h2d:
        raise UntargetedError("broadcasts: a device has no room for a buffer to send from and one to receive into")
    load = [0] * max(len(have.pieces), len(want.pieces))
    chosen: Chosen = {}
    notes: dict[str, None] = {}
    for part, takers in zip(parts, wanting, strict=True):
        bundles, said = make_bundles(part, buffers.limit_bytes, buffers.limit_bytes)
        notes.update(dict.fromkeys(said))
        if bundles:
            _choose(bundles, takers, load, chosen)
    shares = [aligned(-(-_size(some) // each)) for some in chosen.values()]
    limit = min(buffers.limit_bytes, max([memory.least_bytes, *shares]))
    buckets = _in_steps({route: _filled(some, limit) for route, some in _routes(chosen, load).items()}, buffers.num_ipc)
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


Chosen = dict[tuple[int, Ranks], list[Bundle]]
"""Bundles by their source and by those that take them."""


def _choose(bundles: Sequence[Bundle], takers: Sequence[int], load: list[int], chosen: Chosen) -> None:
    """Choose sources: a taker's own device, and for all other takers whoever has least to send; `load` counts it."""
    apart: dict[Ranks, tuple[Ranks, Ranks]] = {}
    source = [-1] * len(bundles)
    free: list[int] = []
    for i, bundle in enumerate(bundles):
        if bundle.ranks not in apart:
            held = set(bundle.ranks)
            apart[bundle.ranks] = tuple(t for t in takers if t in held), tuple(t for t in takers if t not in held)
        own, others = apart[bundle.ranks]
        for taker in own:
            chosen.setdefault((taker, (taker,)), []).append(bundle)
        if others and len(bundle.ranks) > 1:
            free.append(i)
        elif others:
            source[i] = bundle.ranks[0]
            load[source[i]] += bundle.size_bytes
    turned: dict[Ranks, Ranks] = {}
    for i in sorted(free, key=lambda i: -bundles[i].size_bytes):
        bundle = bundles[i]
        if bundle.ranks not in turned:  # classes of takers begin with different sources
            at = takers[0] % len(bundle.ranks)
            turned[bundle.ranks] = bundle.ranks[at:] + bundle.ranks[:at]
        source[i] = min(turned[bundle.ranks], key=load.__getitem__)
        load[source[i]] += bundle.size_bytes
    for rank, bundle in zip(source, bundles, strict=True):
        if rank >= 0:
            chosen.setdefault((rank, apart[bundle.ranks][1]), []).append(bundle)


def _routes(chosen: Chosen, load: list[int]) -> dict[Route, list[Bundle]]:
    """Order takers: each source begins with another one, and last comes who has most to send: it sends nothing on."""
    routes: dict[Route, list[Bundle]] = {}
    for (source, takers), bundles in chosen.items():
        at = next((i for i, taker in enumerate(takers) if taker > source), 0)
        routes[source, *takers[at:], *takers[:at]] = bundles
    for route, bundles in routes.items():
        for rank in route[1:-1]:
            load[rank] += _size(bundles)
    balanced: dict[Route, list[Bundle]] = {}
    for route, bundles in routes.items():
        source, takers = route[0], route[1:]
        size, most = _size(bundles), max(takers[:-1], key=load.__getitem__, default=takers[-1])
        if load[most] > load[takers[-1]] + size:
            load[most] -= size
            load[takers[-1]] += size
            at = takers.index(most) + 1
            takers = takers[at:] + takers[:at]
        balanced[source, *takers] = bundles
    return balanced


def _size(bundles: Sequence[Bundle]) -> int:
    return sum(bundle.size_bytes for bundle in bundles)


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


def _in_steps(routes: dict[Route, list[list[Bundle]]], num_ipc: int) -> tuple[Bucket, ...]:
    """Buckets in the order of their first steps; those that stay on their device come first."""
    sources = {rank: place for place, rank in enumerate(sorted({route[0] for route in routes}))}
    takers = {rank: place for place, rank in enumerate(sorted({route[1] for route in routes}))}
    both = max(len(sources), len(takers), 1)
    turn = {route: (takers[route[1]] - sources[route[0]]) % both for route in routes}
    apart = {route: buckets for route, buckets in routes.items() if route[0] != route[1]}
    order = [(route, j) for route in sorted(routes.keys() - apart.keys()) for j in range(len(routes[route]))]
    if len(apart) > MOST_MATCHED:
        rotated = sorted(apart, key=lambda route: (turn[route], route))
        order += [(route, j) for route in rotated for j in range(len(routes[route]))]
    else:
        orders = [_matched(apart, turn, whole=whole) for whole in (False, True)]
        order += min(orders, key=lambda some: matched_steps([route for route, _ in some], num_ipc).num_steps)
    made: list[Bucket] = []
    turns = dict.fromkeys(sources, 0)
    for route, j in order:
        made.append(_bucket(turns[route[0]], route, routes[route][j]))
        turns[route[0]] += 1
    return tuple(made)


def _matched(
    routes: dict[Route, list[list[Bundle]]], turn: dict[Route, int], *, whole: bool
) -> list[tuple[Route, int]]:
    """Step by step the routes of whose devices one has most left, as far as the first hop is free, or the `whole`."""
    left = {route: [_size(bundles) for bundles in some] for route, some in routes.items()}
    out, into = dict[int, int](), dict[int, int]()
    for route, sizes in left.items():
        for sender, receiver in pairwise(route):
            out[sender] = out.get(sender, 0) + sum(sizes)
            into[receiver] = into.get(receiver, 0) + sum(sizes)
    order: list[tuple[Route, int]] = []

    def need(route: Route) -> int:
        return max(max(out[sender], into[receiver]) for sender, receiver in pairwise(route))

    while left:
        busy, full = set[int](), set[int]()
        for route in sorted(left, key=lambda route: (-need(route), -len(route), turn[route], route)):
            sends, takes = (route[:-1], route[1:]) if whole else (route[:1], route[1:2])
            if not busy.isdisjoint(sends) or not full.isdisjoint(takes):
                continue
            busy.update(sends)
            full.update(takes)
            sizes = left[route]
            order.append((route, len(routes[route]) - len(sizes)))
            size = sizes.pop(0)
            for sender, receiver in pairwise(route):
                out[sender] -= size
                into[receiver] -= size
            if not sizes:
                del left[route]
    return order


def _bucket(turn: int, route: Route, bundles: Sequence[Bundle]) -> Bucket:
    items, offset = [], 0
    for bundle in bundles:
        for unit, box in bundle.pieces:
            items.append(Item(Piece(unit.tensor.name, box), offset))
            offset += size_in_bucket(unit.tensor, box)
    return Bucket(route[0], turn, tuple(items), offset, route[1:])
