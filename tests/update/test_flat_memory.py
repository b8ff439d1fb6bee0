"""Nothing is kept of an update that is over: no objects, descriptors or threads, and no weights of its source.

Collection of cycles is off during updates: a cycle that holds the weights of a source holds them until the
interpreter looks through all of its memory, thousands of updates later.
"""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from tests.support.update.changing import changing_source
from tests.support.update.models import SMALL, model, served, trained
from tests.support.update.workers import Workers
from treadle.update import Source, UpdateError, UpdateOptions, Updater
from treadle.weights.tensor_boxes import Holding, Piece

ROUNDS, KNOWN = 12, 4
"""Updates, and those at the beginning that fill what is kept for the next one."""

OPTIONS = UpdateOptions(SMALL, deadline_s=PATIENT_S, rollback="host")
KINDS = {
    "broadcast": OPTIONS,
    "targeted": replace(OPTIONS, transfer="targeted"),
    "elements": replace(OPTIONS, transfer="targeted", changed="elements"),
    "failing": OPTIONS,
}


def counted() -> Counter[str]:
    """Objects by type, descriptors and threads of this process, and what Python and NumPy have allocated."""
    gc.collect()
    found = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    found = Counter({name: number for name, number in found.items() if name.startswith(("treadle", "torch", "thread"))})
    found["descriptors"] = len(list(Path("/proc/self/fd").iterdir()))
    found["threads"] = len(list(Path("/proc/self/task").iterdir()))
    found["blocks of 8 KiB"] = tracemalloc.get_traced_memory()[0] >> 13
    return found


def counted_together() -> Counter[str]:
    """The same while no rank is in an attempt."""
    dist.barrier()
    found = counted()
    dist.barrier()
    return found


class Unreadable(Source):
    """Weights of which a piece cannot be read."""

    def local(self, piece: Piece) -> torch.Tensor:
        raise OSError(f"{piece.tensor} cannot be read")


def kept(
    rank: int, sockets: Path, ledger: Path, have: Holding, options: UpdateOptions, versions: range, *, fails: bool
) -> tuple[dict[str, int], int]:
    """What there is more at the end than after a few updates, and how many sources are still there."""
    alive, before = 0, Counter[str]()
    tracemalloc.start()
    gc.collect()
    gc.disable()
    try:
        with Updater(sockets, ledger=ledger, options=options) as updater:
            for version in versions:
                source = changing_source(have, rank, version)
                held = weakref.ref(source)
                if fails:
                    unreadable = Unreadable(source.tensors, source.held)
                    with pytest.raises(UpdateError):
                        updater.update(unreadable if rank == 0 else source, version)
                    del unreadable
                updater.update(source, version)
                del source
                if fails:  # errors hold frames, which hold errors
                    gc.collect()
                alive += held() is not None
                if version == versions[KNOWN]:
                    before = counted_together()
            after = counted_together()
    finally:
        gc.enable()
        tracemalloc.stop()
    return {name: after[name] - before[name] for name in after if after[name] > before[name]}, alive


def held_here(adapter: Any) -> Counter[str]:
    """What a worker holds."""
    return counted()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_kept_of_an_update(kind: str) -> None:
    tensors = model(2, 64)
    have, want = trained(tensors, 2), served(tensors)
    numbers = [range(1, ROUNDS + 1), range(ROUNDS + 1, 2 * ROUNDS + 1)]
    held = []
    with Workers(want) as workers:
        for versions in numbers:
            places = workers.sockets, workers.ledger, have, KINDS[kind], versions
            for more, alive in check(run_ranks(4, partial(kept, fails=kind == "failing"), *places)):
                assert alive == 0, f"{alive} of {ROUNDS} sources are held"
                assert {name: number for name, number in more.items() if number >= ROUNDS - KNOWN - 1} == {}
            held.append([workers.tell(worker, held_here) for worker in range(4)])
    for early, late in zip(*held, strict=True):
        assert {name: late[name] - early[name] for name in late if late[name] - early[name] >= ROUNDS} == {}
