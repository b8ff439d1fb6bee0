"""Weight updates: new weights from a trainer's ranks into running inference workers, committed or not at all.

    host 0                                                    host 1
    ┌─ update rank 0 ──────────────┐        TCP, sealed       ┌─ update rank 1 ──────────────┐
    │  Updater ── AttemptRun       │        with the key      │  Updater ── AttemptRun       │
    │  coordinator thread <────────┼──────────────────────────┼── CoordinatorClient          │
    │  CommitLog (disk)            │                          │                              │
    │  Source ─> H2D buffers ──────┼── broadcast (gloo, NCCL) ┼────────> IPC buffers         │
    └──────┬───────────────┬───────┘                          └──────┬───────────────┬───────┘
      Unix socket     IPC buffers                               Unix socket     IPC buffers
      (messages)      (weights)                                 (messages)      (weights)
    ┌──────┴───────────────┴───────┐                          ┌──────┴───────────────┴───────┐
    │  Endpoint ── Worker          │                          │  Endpoint ── Worker          │
    │  Adapter ── engine           │                          │  Adapter ── engine           │
    └─ inference worker 0 ─────────┘                          └─ inference worker 1 ─────────┘

One update rank runs beside each inference worker, on the same device, and speaks for it; ranks that only hold weights
speak for none. It is one of the ranks that call for updates, which are there from start to end, or an agent, which
joins them and leaves (`agent.py`): an attempt is of those that are present when it begins. The coordinator, a thread of
rank 0, moves all ranks from phase to phase and writes the decision. `AttemptRun.run` is an update in numbered steps.

    updater.py         Updater: what a user calls         coordinator/  the coordinator and its commit log
    agent.py           Agent: a rank that comes and goes
    update_options.py  UpdateOptions                      rank/         an update rank
    errors.py          UpdateError                        worker/       an inference worker: Endpoint, Worker, Gate
    protocol/        all decisions, as pure functions   adapters/     engines: plain, transformers, vLLM
    memory/          buffers, and copies with digests

All workers have voted before the decision is written to disk, and it is on disk before any rank hears it. A worker
that has voted stays closed until it learns the decision, however late; one that has not voted may roll back by itself.
Attempts are numbered, and messages of an older attempt are refused.

A worker serves while it has a lease on what it holds. By default a lease has no end, and every worker has to vote.
Where leases end, a thread of each rank renews its worker's, and the coordinator waits until those of absent workers are
over: an update then needs as many replicas as the policy asks for.

Every party has an identity. A log has a random id, which a worker that votes belongs to from then on. An endpoint has
an incarnation, new with each start, and a slot: a lock beside its socket that one process at a time holds, so two
workers with one slot cannot both serve. Workers of another log, and a set without some members of this one, are refused
unless the caller passes `takeover`; members whose leases are over are not missed.

Ranks that hold the same piece may hold different bytes, which a sender's digests cannot show: each rank compares
received buckets with its own copies, by default a sample that moves on with each update, and refuses before its vote.
"""

from typing import TYPE_CHECKING, Any

from treadle.host.extras import brought_by

with brought_by("update", needed_by="treadle.update"):
    from treadle.update.adapters import Adapter, Plain
    from treadle.update.errors import UpdateError
    from treadle.update.update_options import UpdateOptions
    from treadle.update.worker.endpoint import Endpoint
    from treadle.update.worker.gate import ClosedError, Gate

if TYPE_CHECKING:
    from treadle.update.rank.source import Source, WeightSource
    from treadle.update.updated import Updated
    from treadle.update.updater import Updater

__all__ = [
    "Adapter",
    "ClosedError",
    "Endpoint",
    "Gate",
    "Plain",
    "Source",
    "UpdateError",
    "UpdateOptions",
    "Updated",
    "Updater",
    "WeightSource",
]

_OF_RANKS = {"Source": "rank.source", "Updated": "updated", "Updater": "updater", "WeightSource": "rank.source"}


def __getattr__(name: str) -> Any:
    """Import what only update ranks need when it is first used: inference workers start without it."""
    if name not in _OF_RANKS:
        raise AttributeError(f"module 'treadle.update' has no attribute {name!r}")
    from importlib import import_module

    with brought_by("update", needed_by=f"treadle.update.{name}"):
        return getattr(import_module(f"treadle.update.{_OF_RANKS[name]}"), name)
