"""Leases: until when a worker may serve unheard, as the worker and as the coordinator see it.

A worker serves until the time of one of its reports plus the lease, by its own clock. The coordinator takes the lease
for out until that long after it granted it, and a margin for clocks of different rates, by its own: always later. Two
rules keep whoever serves on what is committed:

    I1  a commit is written only when every lease that may be out was given up, by a vote, or has run out
    I2  grants name only what the log has

A lease without end runs out never: its worker has to vote, or its process to have ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from treadle.update.protocol.record import Record
from treadle.update.protocol.update_messages import Grant
from treadle.update.protocol.worker_decisions import Content, MessageRefusedError, WorkerState, is_granted

MARGIN = 50
"""Clocks of two hosts count the same time to one part in this many."""


# ---- a worker --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lease:
    """A worker's lease on what it holds, and the last coordinator that it heard: `term` of `log`.

    `until_ns` is on the worker's clock: 0 where it has none, None for one without end.
    """

    content: Content | None = None
    until_ns: int | None = 0
    log: str = ""
    term: int = 0

    def until(self, held: Content | None) -> int | None:
        """Return until when this content may be served."""
        return self.until_ns if held is not None and held == self.content else 0


def is_past(until_ns: int | None, now_ns: int) -> bool:
    """Return whether a time has come; None never comes."""
    return until_ns is not None and now_ns >= until_ns


def is_served(state: WorkerState, lease: Lease, now_ns: int) -> bool:
    """Return whether a worker serves: it is open, and its lease is on what it holds, and not over."""
    return state.state == "serving" and not is_past(lease.until(state.held), now_ns)


def extends(state: WorkerState, grant: Grant) -> bool:
    """Return whether a grant only extends the lease of a worker that is open; else it is `worker_decisions.grant`'s."""
    return state.state == "serving" and not state.retired and is_granted(state.held, grant)


def leased(lease: Lease, held: Content | None, grant: Grant) -> Lease:
    """Return the lease after a grant; `held` is what the worker holds then. A grant never shortens a lease.

    Raises MessageRefusedError for a grant of an earlier coordinator of the same log.
    """
    if grant.log == lease.log and grant.term < lease.term:
        raise MessageRefusedError(
            "stale",
            f"the coordinator of term {grant.term} is over, that of term {lease.term} of this log was heard; end the "
            "update ranks of the earlier one",
        )
    until_ns = grant.stamp_ns + grant.lease_ns if grant.lease_ns is not None else None
    before = lease.until(held)
    if until_ns is not None and (before is None or before > until_ns):
        until_ns = before
    return Lease(held, until_ns, grant.log, grant.term)


# ---- the coordinator -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leases:
    """Leases that may be out: by the incarnation of a worker, until when by the coordinator's clock (None: no end).

    `lease_ns` is the length of those it grants, None for leases without end. `least`: how many replicas an update
    needs, None for all.
    """

    lease_ns: int | None = None
    least: int | None = None
    out: Mapping[str, int | None] = field(default_factory=dict)

    def granted(self, incarnation: str, now_ns: int) -> Leases:
        """Return the leases after one is granted."""
        return replace(self, out={**self.out, incarnation: _later(self.out.get(incarnation, 0), self.lease_ns, now_ns)})

    def without(self, incarnations: Collection[str]) -> Leases:
        """Return the leases after some were given up, or their processes have ended."""
        return replace(self, out={name: until for name, until in self.out.items() if name not in incarnations})

    def ends_ns(self, voted: Collection[str]) -> int | None:
        """Return when all leases are over but those of workers that voted; 0 where that is so now, None for never."""
        ends = [until for name, until in self.out.items() if name not in voted]
        return None if None in ends else max((until for until in ends if until is not None), default=0)

    def is_endless(self, incarnation: str) -> bool:
        """Return whether a worker of the log may have a lease without end."""
        return self.lease_ns is None or self.out.get(incarnation, 0) is None


def leases_of(record: Record, lease_ns: int | None, least: int | None, now_ns: int) -> Leases:
    """Return the leases of a coordinator that starts: every member of the log may have got one just now."""
    until = _later(0, record.lease_ns, now_ns)
    return Leases(lease_ns, least, dict.fromkeys((member.incarnation for member in record.members), until))


def _later(until: int | None, lease_ns: int | None, now_ns: int) -> int | None:
    if until is None or lease_ns is None:
        return None
    return max(until, now_ns + lease_ns + lease_ns // MARGIN)
