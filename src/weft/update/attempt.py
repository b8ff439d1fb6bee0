"""One attempt as the coordinator sees it: what every rank has said, and what follows from it. Pure: no sockets.

    enter ──> settle ──> layout ──> plan ──> begin ──> finish (the vote) ──> open

A phase ends when all ranks have spoken. The decision lies between `finish` and the answer to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from weft.update.catalogue import list_layouts
from weft.update.ledger import Record
from weft.update.wire.control import Agreed, Enter, Fault, Layouts, Phase, Send, Settled, Sides
from weft.update.wire.messages import Wants


class Refusal(ValueError):  # noqa: N818 - told to all ranks, raised by none
    """Why an attempt cannot go on: who is to blame, and the reason."""

    def __init__(self, who: str, text: str) -> None:
        super().__init__(text)
        self.who = who


@dataclass
class Attempt:
    """What has been said so far, by rank."""

    world: int
    epoch: int = 0
    phase: Phase = "enter"
    committed: bool = False
    entered: dict[int, Enter] = field(default_factory=dict)
    settled: dict[int, Settled] = field(default_factory=dict)
    agreed: dict[int, Agreed] = field(default_factory=dict)

    @property
    def first(self) -> Enter:
        """All ranks entered alike."""
        return next(iter(self.entered.values()))

    def missing(self, sides: dict[int, Sides]) -> list[int]:
        """Ranks that have not spoken in this phase."""
        by_phase: dict[str, Collection[int]] = {"enter": self.entered, "settle": self.settled, "layout": sides}
        said = by_phase.get(self.phase, self.agreed)
        return [rank for rank in range(self.world) if rank not in said]

    def refuse_entries(self, record: Record) -> None:
        """Raises Refusal where ranks do not want the same thing, or want what cannot be."""
        first = self.first
        for entry in self.entered.values():
            if entry.fault is not None:
                raise Refusal(entry.fault.who, entry.fault.text)
            if entry.status is None:
                raise Refusal(f"update rank {entry.rank}", "it does not say how its worker stands")
        for rank, entry in self.entered.items():
            mine, theirs = (first.kind, first.version), (entry.kind, entry.version)
            if mine != theirs or (first.base, first.changed) != (entry.base, entry.changed):
                raise Refusal(
                    f"update rank {rank}",
                    f"it enters with {entry.kind} of version {entry.version}, update rank {first.rank} with "
                    f"{first.kind} of version {first.version}; all ranks must ask for the same",
                )
        if first.kind == "update" and record.version is not None and first.version <= record.version:
            raise Refusal(
                "the caller", f"version {first.version} is not newer than {record.version}, which is committed"
            )
        if first.kind == "recover" and record.version is None:
            raise Refusal("the caller", "no version was ever committed, so there is none to recover; update first")
        if first.kind == "recover" and first.version not in (0, record.version):
            raise Refusal(
                "the caller", f"the source has version {first.version}, version {record.version} is committed"
            )

    def next_epoch(self) -> int:
        """The largest that any worker knows of."""
        return max(entry.status.epoch for entry in self.entered.values() if entry.status is not None)

    @property
    def digests(self) -> dict[int, tuple[str, str]]:
        """Each rank's layouts."""
        return {rank: (entry.has, entry.wants) for rank, entry in self.entered.items()}

    def sends(self) -> dict[int, Send]:
        """Which rank is asked for what, so that each layout is told once."""
        has: dict[str, int] = {}
        wants: dict[str, int] = {}
        for rank, entry in sorted(self.entered.items()):
            has.setdefault(entry.has, rank)
            wants.setdefault(entry.wants, rank)
        return {
            rank: Send(self.epoch, has=has[entry.has] == rank, wants=wants[entry.wants] == rank)
            for rank, entry in self.entered.items()
        }

    def catalogue(self, sides: dict[int, Sides]) -> bytes:
        """What was told, each layout once, packed."""
        told: dict[str, Wants] = {}
        entries = [self.entered[rank] for rank in range(self.world)]
        for rank, entry in enumerate(entries):
            side = sides[rank]
            if side.has is not None:
                told[entry.has] = side.has
            if side.wants is not None:
                told[entry.wants] = side.wants
        for rank, entry in enumerate(entries):
            if entry.has not in told or entry.wants not in told:
                raise Refusal(f"update rank {rank}", "nobody told the layout that it entered with")
        free = [sides[rank].free_bytes for rank in range(self.world)]
        return list_layouts(told, [entry.has for entry in entries], [entry.wants for entry in entries], free)

    def layouts(self, record: Record, catalogue: bytes | None) -> Layouts | None:
        """Who is to be loaded with what; None where nobody needs anything."""
        everyone = tuple(range(self.world))
        holds = tuple(r for r in everyone if self.settled[r].status.state == "serving")
        first, version = self.first, record.version
        if first.kind == "recover":
            assert version is not None
            loads = tuple(r for r in everyone if r not in holds)
            if not loads:
                return None
            givers = tuple(r for r in holds if self.entered[r].gives) if first.version == 0 else ()
            if first.version == 0 and not givers:
                lost = f"every copy of version {version} is lost; all"
                mute = f"workers {_listed(holds)} serve version {version} and their engines cannot hand it out; these"
                raise Refusal(
                    f"workers {_listed(loads)}",
                    f"{mute if holds else lost} stay closed until the next update, or until "
                    f"recover(source, version={version}) is called with a source that still has it",
                )
            return Layouts(self.epoch, version, loads, givers, None, self._circle(), catalogue)
        only, why = self._only(record, holds)
        return Layouts(self.epoch, first.version, everyone, (), only, self._circle(), catalogue, why)

    def _circle(self) -> int:
        """The communicator that all have, or a new one."""
        had = {entry.circle for entry in self.entered.values()}
        return had.pop() if len(had) == 1 and 0 not in had else self.epoch

    def _only(self, record: Record, holds: tuple[int, ...]) -> tuple[tuple[str, ...] | None, str]:
        """The tensors that must move, None for all, and why all where a caller asked for less."""
        first = self.first
        if first.changed is None:
            return None, ""
        if first.base is None or first.base != record.version:
            return None, f"all tensors move: the changes are against version {first.base}, {record.version} is served"
        if len(holds) < self.world:
            away = _listed(r for r in range(self.world) if r not in holds)
            return None, f"all tensors move: workers {away} do not hold version {record.version}"
        mute = [rank for rank, entry in self.entered.items() if not entry.gives]
        if mute:
            return None, f"all tensors move: the engines of workers {_listed(sorted(mute))} take all or none"
        return first.changed, ""

    def disagreement(self) -> str | None:
        """Where values differ that must be the same."""
        values = {agreed.value for agreed in self.agreed.values()}
        if len(values) > 1:
            told = ", ".join(f"rank {rank}: {agreed.value}" for rank, agreed in sorted(self.agreed.items()))
            return f"ranks made different plans ({told}); do all run the same code on the same layouts"
        return None

    def fault(self, who: str, text: str) -> Fault:
        """Something that went wrong now."""
        return Fault(self.epoch, who, self.phase, -1, text)


def _listed(workers: Iterable[int]) -> str:
    return ", ".join(map(str, workers))
