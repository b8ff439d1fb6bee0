"""Facts of a run, compared over all ranks of the world before there is a mesh of them: through torch's store.

Each rank writes the digest of its facts, and of each digest the facts are there once. The rank that comes last compares
them, and writes the refusal, which all read. A rank makes a few requests, and no connection to another rank.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from treadle.runtime.agreement import MOST_TEXT, Claim, Facts, Version, contrast
from treadle.runtime.faults.arrivals import absent

_ABOUT = "the run"


def agree_over_world(
    rank: int,
    num_ranks: int,
    deadline_s: float,
    facts: Facts,
    problem: ValueError | None = None,
    *,
    world: Store | None = None,
) -> None:
    """Raise ValueError on all ranks if one has a problem, or other facts. All ranks call it as often.

    Raises:
        RankLostError: a rank did not come within the deadline.

    """
    world = world if world is not None else _get_default_store()
    number = world.add(f"treadle/agreements of {rank}", 1)
    store, deadline = PrefixStore(f"treadle/agreement {number}", world), timedelta(seconds=deadline_s)
    _write(store, rank, Claim(_ABOUT, facts), problem)
    if store.add("written", 1) == num_ranks:
        store.set("refusal", _judged(store, num_ranks))
    try:
        store.wait(["refusal"], deadline)
    except RuntimeError as error:
        missing = [other for other in range(num_ranks) if not store.check([str(other)])]
        if not missing:
            raise
        raise absent(missing, rank, deadline_s) from error
    refusal = store.get("refusal").decode()
    if refusal:
        _let_others_read(store, num_ranks, deadline)
        raise problem if problem is not None else ValueError(refusal)


def _write(store: Store, rank: int, claim: Claim, problem: ValueError | None) -> None:
    """Write what this rank has; its facts if it is the first with them."""
    if problem is None and store.add(f"ranks with {claim.digest}", 1) == 1:
        store.set(f"facts {claim.digest}", json.dumps(dict(claim.facts)))
    text = str(problem)[:MOST_TEXT] if problem is not None else None
    store.set(str(rank), json.dumps([socket.gethostname(), claim.digest, text]))


def _judged(store: Store, num_ranks: int) -> str:
    """Return why all ranks refuse, "" if they agree."""
    versions: dict[str, list[tuple[int, str]]] = {}
    for rank in range(num_ranks):
        host, digest, problem = json.loads(store.get(str(rank)))
        if problem is not None:
            return f"rank {rank} could not start: {problem}"
        versions.setdefault(digest, []).append((rank, host))
    if len(versions) == 1:
        return ""
    pair = []
    for digest, holders in sorted(versions.items(), key=lambda version: version[1])[:2]:
        (rank, host), facts = holders[0], json.loads(store.get(f"facts {digest}"))
        pair.append(Version(rank, len(holders), host, "", facts, Claim(_ABOUT, {}).refusal))
    return contrast(pair)


def _let_others_read(store: Store, num_ranks: int, deadline: timedelta) -> None:
    """Wait until all ranks have read the refusal: the store may end with the process of one that raises it."""
    with suppress(RuntimeError):
        if store.add("read", 1) == num_ranks:
            store.set("read by all", "")
        store.wait(["read by all"], deadline)
