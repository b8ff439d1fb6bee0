"""The agreement of ranks: facts that must be the same on all of them, by name, and reasons of one to reject a pipeline.

Ranks compare a digest of their facts, in a message of one size whatever the facts are. Where digests differ, two ranks
that have different ones compare their facts by name through torch's store, and all ranks raise the same error: which
facts differ, on which rank and host, with both values.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from treadle.dist.groups import Group, next_name
from treadle.dist.mesh_position import MeshPosition
from treadle.dist.rank_groups import Groups
from treadle.dist.streams import HOST_MEMORY
from treadle.runtime.faults.arrivals import Arrivals
from treadle.runtime.faults.guard import Guard

Facts: TypeAlias = Mapping[str, str]
"""Each fact by its name, as a text."""

_NOBODY = -1
_UNSET = -(1 << 62)
_MOST_TEXT = 600
_MOST_FACTS = 6
_MOST_VALUE = 100


class Rejections:
    """Texts that ranks exchange about a pipeline, in torch's store: the groups' collectives carry numbers only."""

    def __init__(self, name: str) -> None:
        self._store = PrefixStore(f"treadle/{name}/rejections", _get_default_store())

    def write(self, rank: int, reason: str) -> None:
        """Stores the reason of a rank, before the collective that names the rank."""
        with suppress(RuntimeError):  # the store is gone; the rank itself still raises its reason
            self._store.set(str(rank), reason[:_MOST_TEXT].encode(errors="replace").decode())

    def read(self, rank: int) -> str:
        """Returns the reason of a rank, after a colon, or where else to find it."""
        with suppress(RuntimeError):
            if self._store.check([str(rank)]):
                return f": {self._store.get(str(rank)).decode(errors='replace')}"
        return "; its own error says why"

    def give(self, key: str, text: str) -> None:
        """Stores a text of any length."""
        self._store.set(key, text)

    def take(self, key: str, deadline: timedelta) -> str:
        """Waits for a text, and returns it."""
        self._store.wait([key], deadline)
        return str(self._store.get(key).decode())


class _Holder(NamedTuple):
    """A rank with its facts, and how many ranks have the same ones."""

    rank: int
    host: str
    num: int
    facts: dict[str, str]

    @property
    def where(self) -> str:
        alike = f", {self.num} ranks alike" if self.num > 1 else ""
        return f"rank {self.rank} ({self.host}{alike})"


def digest_of(value: object) -> int:
    """Returns a number of 56 bits that tells values with different `repr` apart."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def agree_to_start(
    groups: Groups, facts: Facts, problem: ValueError | None, *, doing: str = "make its part of the pipeline"
) -> None:
    """Raises on all ranks if one has a problem, or other facts. Ranks with a problem raise that.

    `doing` is what the rank with the problem could not do.
    """
    rejections, rank = Rejections(groups.name), groups.position.rank
    if problem is not None:
        rejections.write(rank, str(problem))
    named = _highest(_before_copies(groups), _NOBODY if problem is None else rank)
    if problem is not None:
        raise problem
    if named != _NOBODY:
        raise ValueError(f"rank {named} could not {doing}{rejections.read(named)}")
    reason = difference(groups, _before_copies(groups), {0: facts})
    if reason is not None:
        raise ValueError(f"{reason}; these must be the same on all ranks")


def difference(groups: Groups, over: Sequence[Group], parts: Mapping[int, Facts], num_parts: int = 1) -> str | None:
    """Returns where facts differ between the ranks that `over` connects, the same text on each of them, or None.

    Facts are in parts 0 to `num_parts` - 1: of each, the ranks that have it must have the same facts.
    """
    digests = {part: digest_of(sorted(facts.items())) for part, facts in parts.items()}
    largest = torch.full((num_parts, 2), _UNSET, dtype=torch.int64, device=HOST_MEMORY)
    for part, digest in digests.items():
        largest[part, 0], largest[part, 1] = digest, -digest
    for group in over:
        group.all_reduce(largest, largest=True)
    rows = [(part, high, -low) for part, (high, low) in enumerate(largest.tolist()) if high != _UNSET and high != -low]
    if not rows:
        return None
    part, *both = rows[0]
    return _compare(groups, over, parts.get(part, {}), digests.get(part), both)


def _compare(groups: Groups, over: Sequence[Group], facts: Facts, digest: int | None, both: list[int]) -> str:
    """Returns how the facts of the ranks with the one digest differ from those of the ranks with the other."""
    rank, rejections, mine = groups.position.rank, Rejections(groups.name), [each == digest for each in both]
    first = torch.tensor([-rank if own else _UNSET for own in mine], dtype=torch.int64, device=HOST_MEMORY)
    num = torch.tensor([int(own) for own in mine], dtype=torch.int64, device=HOST_MEMORY)
    for group in over:
        group.all_reduce(first, largest=True)
        group.all_reduce(num)
    pair = [-number for number in first.tolist()]
    name = f"facts of {min(pair)} and {max(pair)}, {both}"
    if rank in pair:
        own = _Holder(rank, socket.gethostname(), int(num[pair.index(rank)]), dict(facts))
        if rank == max(pair):
            rejections.give(name, json.dumps(own))
        else:
            other = _Holder(*json.loads(rejections.take(name, groups.deadline)))
            rejections.give(f"{name}, compared", _described(own, other))
    return rejections.take(f"{name}, compared", groups.deadline)


def _described(one: _Holder, other: _Holder) -> str:
    """Returns who differs, in what, with both values."""
    names = [name for name in {**one.facts, **other.facts} if one.facts.get(name) != other.facts.get(name)]
    shown = [f"{name} ({_both(one.facts.get(name), other.facts.get(name))})" for name in names[:_MOST_FACTS]]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"{one.where} and {other.where} differ in {', '.join(shown)}{more}"


def _both(one: str | None, other: str | None) -> str:
    """Returns both values, short; long ones that begin alike by their digests."""
    shown = ["nothing" if value is None else value for value in (one, other)]
    cut = [value if len(value) <= _MOST_VALUE else f"{value[:_MOST_VALUE]}..." for value in shown]
    if cut[0] == cut[1]:
        cut = [f"{value} digest {digest_of(whole):014x}" for value, whole in zip(cut, shown, strict=True)]
    return " and ".join(cut)


def agree_over_world(
    rank: int, num_ranks: int, deadline_s: float, facts: Facts, problem: ValueError | None = None
) -> None:
    """Compares facts over all ranks of the world, before there is a mesh of them (`agree_to_start`)."""
    position = MeshPosition(0, rank, (tuple(range(num_ranks)),))
    name, guard = next_name(position), Guard()
    arrivals = Arrivals(name, position)
    with arrivals.making():
        guard.join(arrivals, position, deadline_s, None)
    with guard.making(all_refuse=True):
        groups = guard.unless_lost(partial(Groups.make, name, position, timedelta(seconds=deadline_s)))
        guard.break_off_on_alarm(groups)
        try:
            agree_to_start(groups, facts, problem, doing="start")
        finally:
            groups.close()
    guard.close()


def raise_for_all(groups: Groups, reason: str | None) -> None:
    """Raises on every rank if one has a reason to reject the pipeline; ranks without one quote the highest that has."""
    rank, rejections = groups.position.rank, Rejections(groups.name)
    if reason is not None:
        rejections.write(rank, reason)
    over = [group for group in (groups.dp_group, groups.copies_group, groups.pp_group) if group is not None]
    named = _highest(over, _NOBODY if reason is None else rank)
    if named != _NOBODY:
        raise ValueError(
            f"rank {rank}: {reason}"
            if reason is not None
            else f"rank {named} rejected the pipeline{rejections.read(named)}"
        )


def _before_copies(groups: Groups) -> list[Group]:
    """Returns the groups that there are before the Program is known, which together connect all ranks."""
    return [group for group in (groups.dp_group, groups.pp_group) if group is not None]


def _highest(over: Sequence[Group], number: int) -> int:
    told = torch.tensor([number], dtype=torch.int64, device=HOST_MEMORY)
    for group in over:
        group.all_reduce(told, largest=True)
    return int(told)
