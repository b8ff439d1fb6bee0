"""Updates of some tensors, and one plan for sources and for peers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from tests.support.update.engines import OPTIONS, SMALL, Noting, eventually, served, state, whole
from tests.support.update.workers import Asker, Troubled, Workers
from treadle.update import Source, UpdateError, UpdateOptions, Updater
from treadle.update.protocol.update_messages import Move, Refused
from treadle.update.rank.shares import Shares
from treadle.weights.buffer_sizes import Memory
from treadle.weights.tensor_boxes import Tensor
from treadle.weights.update_plan import plan_update

pytestmark = pytest.mark.slow


def run(workers: Workers, do: Callable[..., Any], *args: Any, options: UpdateOptions = OPTIONS) -> list[Any]:
    return check(run_ranks(2, _run, (workers.sockets, workers.ledger), do, options, args))


def _run(
    rank: int, places: tuple[Path, Path], do: Callable[..., Any], options: UpdateOptions, args: tuple[Any, ...]
) -> Any:
    with Updater(places[0], ledger=places[1], options=options) as updater:
        return do(updater, rank, *args)


def test_a_change_that_no_worker_wants_is_refused() -> None:
    tied = whole({"embed": (8, 4), "lm_head": (8, 4)}, 2)
    want = whole({"embed": (8, 4)}, 2)
    with pytest.raises(ValueError, match="'lm_head', which no worker wants; name the tensor it is tied to, or leave"):
        plan_update(tied, want, SMALL, only={"lm_head"})
    with pytest.raises(ValueError, match="'lm_head', which no worker wants"):
        plan_update(tied, want, SMALL, only={"embed", "lm_head"})
    assert plan_update(tied, want, SMALL).buckets
    assert plan_update(tied, want, SMALL, only={"embed"}).buckets


CHANGED: dict[str, tuple[int, ...]] = {"embed": (64, 32), "steps": ()}


def first(updater: Updater, rank: int) -> int:
    return updater.update(Source.of(state(CHANGED, 1)), 1).version


def nothing_then_tied(updater: Updater, rank: int) -> tuple[int, str]:
    source = Source.of(state(CHANGED, 2) | {"lm_head": torch.ones(64, 32)})
    done = updater.update(source, 2, changed=[], base=1)  # the first of this updater: it has no buffers yet
    with pytest.raises(UpdateError) as caught:
        updater.update(source, 3, changed=["lm_head"], base=2)
    return done.size_bytes, str(caught.value)


def values(adapter: Troubled) -> dict[str, list[float]]:
    return {name: sorted(set(held.flatten().tolist())) for name, held in adapter.held.items()}


def ipc_maps(adapter: Troubled) -> int:
    return Path("/proc/self/maps").read_text().count("treadle-ipc")


def test_nothing_changed_and_nothing_wanted() -> None:
    with Workers(whole(CHANGED, 2)) as workers:
        assert run(workers, first) == [1, 1]
        assert eventually(lambda: not workers.tell(0, ipc_maps)), "buffers of update ranks that are gone"
        for moved, told in run(workers, nothing_then_tied):
            assert moved == 0
            assert "no worker wants" in told
        assert workers.tell(0, values) == {"embed": [1.0], "steps": [1.0]}
        asker = Asker(workers.sockets, 0)
        assert asker.status().version == 2
        asker.close()


def recover_twice(updater: Updater, rank: int, flags: Path) -> list[int]:
    """From a source, and later the same bytes from peers."""
    known = {name: Tensor(name, shape, "float32") for name, shape in CHANGED.items()}
    source = Source.of(state(CHANGED, 1)) if rank == 0 else Source(known, {})
    versions = [updater.update(source, 1).version]
    for turn in (0, 1):
        (flags / f"done {turn} {rank}").touch()
        while not (flags / f"restarted {turn}").exists():
            time.sleep(0.02)
        done = updater.recover(source, 1) if turn == 0 else updater.recover()
        versions.append(done.version)
    return versions


def restart(workers: Workers) -> None:
    for turn in (0, 1):
        while not all((workers.directory / f"done {turn} {rank}").exists() for rank in (0, 1)):
            time.sleep(0.02)
        workers.restart(1)
        (workers.directory / f"restarted {turn}").touch()


def test_a_number_moves_too_and_one_plan_is_from_a_source_or_from_peers() -> None:
    """The plans are the same but for who fills buckets: there is no room for an H2D buffer in either."""
    lone = UpdateOptions(Memory(free_bytes=8192, least_bytes=4096), deadline_s=PATIENT_S, drain_s=1)
    with Workers(whole(CHANGED, 2)) as workers:
        thread = threading.Thread(target=restart, args=(workers,), daemon=True)
        thread.start()
        assert run(workers, recover_twice, workers.directory, options=lone) == [[1, 1, 1]] * 2
        assert workers.tell(1, values) == {"embed": [1.0], "steps": [1.0]}


def test_a_plan_to_give_from_has_a_name_of_its_own() -> None:
    shares = Shares(plan_update(whole(CHANGED, 2), whole(CHANGED, 2), SMALL))
    takes, exports = (shares.of_worker(0, exports=which) for which in (False, True))
    assert takes.digest == shares.name(0) != exports.digest == shares.name(0, exports=True)
    engine = Noting()
    worker, _ = served(engine)
    told = worker.handle(Move(1, "unknown", 0, 0, out=True, checked=True))
    assert told == Refused("order", "worker 0 does not have plan unknown", 1)
