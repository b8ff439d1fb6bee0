"""The one exchange of ranks before they run: named facts, judged by all ranks alike.

A rank claims facts about things that other ranks may have too: the run, a stage, a tie. Wherever a thing is claimed its
facts must be equal. Ranks gather digests of claims, and a line for each rank that cannot take part; where digests of a
thing differ, they gather the facts of two ranks and name what differs, with both values. Every rank finds the same
reason, so all refuse at once.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from treadle.dist.gathering import gather_json
from treadle.dist.rank_groups import Groups

Facts: TypeAlias = Mapping[str, str]
"""Each fact by its name, as a text."""

_Holders: TypeAlias = dict[str, dict[str, list[int]]]  # for each thing, by digest of its facts: first rank, how many

MOST_TEXT = 600
_MOST_FACTS = 6
_MOST_VALUE = 100


@dataclass(frozen=True)
class Claim:
    """Facts about a thing, equal wherever it is claimed. A rank may claim one thing twice, at two places.

    `refusal` is the error where they are not, with `{}` for who differs in what.
    """

    about: str
    facts: Facts
    refusal: str = "{}; these must be the same on all ranks"
    place: str = ""

    @property
    def digest(self) -> str:
        """The same for equal facts only."""
        return f"{digest_of(sorted(self.facts.items())):014x}"


class ExchangedFacts(NamedTuple):
    """What an exchange found: why all ranks refuse, if they do, and what ranks told.

    `told` has for each rank along pp the different values that it and its replicas told.
    """

    refusal: str | None
    told: list[list[Any]]


def digest_of(value: object) -> int:
    """Returns a number of 56 bits that tells values with different `repr` apart."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def exchange(
    groups: Groups,
    claims: Sequence[Claim] = (),
    problem: str | None = None,
    *,
    told: Any = None,
    doing: str = "make its part of the pipeline",
) -> ExchangedFacts:
    """Exchange claims, and what ranks tell each other, over all ranks. All of them call it.

    `problem` is why this rank cannot take part in `doing`. The refusal is the problem on its own rank; the others quote
    the first one.
    """
    rank, cut = groups.position.rank, problem[:MOST_TEXT] if problem is not None else None
    holders: _Holders = {}
    for claim in claims:
        holders.setdefault(claim.about, {})[claim.digest] = [rank, 1]
    problems, rows, told_by = [], [], []
    for others_problems, others_holders, others_told in _gather(groups, [_listed(rank, cut), holders, told]):
        problems += others_problems
        rows.append(others_holders)
        told_by.append(others_told)
    if problem is not None:
        return ExchangedFacts(problem, told_by)
    if problems:
        first, text = min(problems)
        return ExchangedFacts(f"rank {first} could not {doing}: {text}", told_by)
    odd = [(about, of) for about, of in _joined(rows).items() if len(of) > 1]
    return ExchangedFacts(_compared(groups, claims, *odd[0]) if odd else None, told_by)


def agree(
    groups: Groups,
    claims: Sequence[Claim] = (),
    problem: ValueError | None = None,
    *,
    told: Any = None,
    doing: str = "make its part of the pipeline",
) -> list[list[Any]]:
    """Raise ValueError on all ranks if one has a problem, or other facts; else return what ranks told (`exchange`)."""
    agreed = exchange(groups, claims, str(problem) if problem is not None else None, told=told, doing=doing)
    if agreed.refusal is not None:
        raise problem if problem is not None else ValueError(agreed.refusal)
    return agreed.told


# -- gathering over replicas first, then along pp --------------------------------------------------------------------


def _gather(groups: Groups, row: list[Any]) -> list[list[Any]]:
    """Return for each rank along pp (problems, holders, values told) of it and its replicas."""
    rows = gather_json(groups.dp_group, row) if groups.dp_group is not None else [row]
    told: list[Any] = []
    for _, _, value in rows:
        told += [value] if value not in told else []
    of_replicas = [[one for problems, _, _ in rows for one in problems], _joined(row[1] for row in rows), told]
    return gather_json(groups.pp_group, of_replicas)


def _listed(rank: int, text: str | None) -> list[list[Any]]:
    return [[rank, text]] if text is not None else []


def _joined(rows: Iterable[_Holders]) -> _Holders:
    """Return the first rank that holds each version of a thing's facts, and how many do, over all rows."""
    joined: _Holders = {}
    for about, versions in (item for row in rows for item in row.items()):
        known = joined.setdefault(about, {})
        for digest, (rank, num) in versions.items():
            first, before = known.get(digest, [rank, 0])
            known[digest] = [min(first, rank), before + num]
    return joined


def _compared(groups: Groups, claims: Sequence[Claim], about: str, versions: dict[str, list[int]]) -> str:
    """Return how the facts of a thing differ between the first two ranks that hold different ones."""
    pair = sorted(versions, key=lambda digest: (versions[digest][0], digest))[:2]
    mine = {
        claim.digest: [socket.gethostname(), claim.place, dict(claim.facts), claim.refusal]
        for claim in claims
        if claim.about == about and versions[claim.digest][0] == groups.position.rank
    }
    found: dict[str, Any] = {}
    for problems_holders_told in _gather(groups, [[], {}, mine]):
        for value in problems_holders_told[2]:
            found |= value
    return contrast([Version(versions[digest][0], versions[digest][1], *found[digest]) for digest in pair])


class Version(NamedTuple):
    """Facts of a thing: the first rank that has them, how many do, its host, its place of the thing, its refusal."""

    rank: int
    num: int
    host: str
    place: str
    facts: Facts
    refusal: str


def contrast(pair: Sequence[Version]) -> str:
    """Return how two versions of a thing's facts differ, in the first one's refusal."""
    wheres = []
    for version in pair:
        alike = f", {version.num} ranks alike" if version.num > 1 else ""
        place = f"{version.place} on " if version.place else ""
        wheres.append(f"{place}rank {version.rank} ({version.host}{alike})")
    one, other = pair
    differing = _differing(one.facts, other.facts)
    return one.refusal.replace("{}", f"{' and '.join(wheres)} differ in {differing}", 1)


def _differing(one: Facts, other: Facts) -> str:
    """Return the names of the facts that differ, with both values."""
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    shown = [f"{name} ({_both(one.get(name), other.get(name))})" for name in names[:_MOST_FACTS]]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more


def _both(one: str | None, other: str | None) -> str:
    """Returns both values, short; long ones that begin alike by their digests."""
    shown = ["nothing" if value is None else value for value in (one, other)]
    cut = [value if len(value) <= _MOST_VALUE else f"{value[:_MOST_VALUE]}..." for value in shown]
    if cut[0] == cut[1]:
        cut = [f"{value} digest {digest_of(whole):014x}" for value, whole in zip(cut, shown, strict=True)]
    return " and ".join(cut)
