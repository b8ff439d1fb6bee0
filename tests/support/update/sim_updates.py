"""Updates of engines on the device of threads, as vLLM's are: they compute on streams of their own.

python -m tests.support.planted --streams load-not-waited-for
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.patience import PATIENT_S
from tests.support.ranks import run_ranks
from tests.support.update.models import SMALL, expected, model, source_of
from tests.support.update.sim_memory import share_buffers
from tests.support.update.workers import Asker, Spawned
from treadle import sim_device
from treadle.update import Endpoint, Plain, Source, UpdateError, UpdateOptions, Updater
from treadle.update.adapters.plain import digest_of
from treadle.update.protocol.update_messages import Answer
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Holding

LATE_US, BUSY_MS = 500.0, 3.0
OPTIONS = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=1, rollback="host", compare_sources="all")


def layouts() -> tuple[Holding, Holding]:
    """Two ranks that have everything, into TP2 along columns, whose slices are strided, and rows."""
    tensors = model(1, 64)
    dim = lambda name: None if "norm" in name else int("down" in name)  # noqa: E731
    return Parallel(replicas=2).holding(tensors), Parallel(tp=2, dim=dim).holding(tensors)


def enter(plant: str, seed: int, index: int) -> torch.device:
    """Take a device that is late by this seed, with a mistake if one is named; without a default device."""
    sim_device.load(delay_us=LATE_US, seed=seed)
    share_buffers()
    torch.accelerator.set_device_index(index)
    torch.set_default_device("cpu")
    if plant:
        from tests.support import planted

        planted.apply(plant)
    return torch.device(sim_device.NAME, index)


class Packing(Plain):
    """An engine that makes what it serves of what was loaded when a load is over."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.packed = {name: torch.zeros_like(held) for name, held in self.held.items()}

    def finish(self) -> str | None:
        sim_device.sleep(BUSY_MS)
        for name, held in self.held.items():
            self.packed[name].copy_(held)
        return None


def serve(sockets: Path, worker: int, want: Holding, plant: str, seed: int) -> Endpoint:
    """Worker w is on device w + 1. What it answers is read on a stream of its own, which waits for nothing."""
    device = enter(plant, seed, worker + 1)
    boxes = {piece.tensor: piece.box for piece in want.pieces[worker]}
    held = {name: torch.zeros(box.shape, dtype=torch.bfloat16, device=device) for name, box in boxes.items()}
    engine = Packing(held, want.tensors, boxes)
    stream = torch.Stream(device)
    torch.accelerator.synchronize()

    def answer(body: bytes) -> tuple[int, bytes]:
        torch.accelerator.set_device_index(device)
        with engine.serving() as version, stream:
            return version, digest_of(engine.packed).encode()

    return Endpoint(engine, sockets, worker, answer=answer, spill=sockets)


def weights(have: Holding, rank: int, version: int, device: torch.device | None) -> Source:
    """Weights on the host, or on a device that has yet to write them."""
    made = source_of(have, rank, version)
    if device is None:
        return made
    there = {piece: held.to(device) for piece, held in made.held.items()}
    sim_device.sleep(BUSY_MS)
    return Source(made.tensors, {piece: held.clone() for piece, held in there.items()})


def served(sockets: Path, worker: int) -> tuple[int, str]:
    asker = Asker(sockets, worker)
    answer = asker.ask()
    asker.close()
    assert isinstance(answer, Answer), answer
    return answer.version, answer.body.decode()


def update(rank: int, sockets: Path, ledger: Path, plant: str, seed: int) -> list[str]:
    """What is wrong: versions from the device and the host arrive, one that differs does not, and goes back."""
    from tests.update.test_pinned import crosses

    device, (have, want) = enter(plant, seed, rank + 1), layouts()
    crosses(device)
    wrong = []
    with Updater(sockets, ledger=ledger, options=OPTIONS) as updater:
        for version, place in enumerate((device, device, None), 1):
            updater.update(weights(have, rank, version, place), version)
            if updater.context.device != device:
                wrong.append(f"the buffers are on {updater.context.device}")
            if served(sockets, rank) != (version, expected(want, rank, version)):
                wrong.append(f"version {version} is off")
        other = weights(have, rank, 4 + rank, device)
        try:
            updater.update(other, 4)
            wrong.append("two versions are taken for one")
        except UpdateError as error:
            if "they hold different weights" not in str(error):
                raise
        if served(sockets, rank) != (3, expected(want, rank, 3)):
            wrong.append("version 3 is off after a way back")
    return wrong


def draw(plant: str, seed: int) -> str:
    """How a mistake shows in updates with delays of a seed; empty where it does not."""
    with Spawned(2, serve, layouts()[1], plant, seed) as workers:
        outcomes = run_ranks(2, update, workers.sockets, workers.ledger, plant, seed, new=True)
    how = [text for outcome in outcomes for text in outcome.value or ()]
    how += [str(outcome).strip().splitlines()[-1] for outcome in outcomes if not outcome.ok]
    return how[0] if how else ""


def find(plant: str, draws: int, seed: int) -> dict[str, object]:
    """Draw updates until one is wrong."""
    for number in range(draws):
        how = draw(plant, seed + number)
        if how:
            return {"found": True, "how": how, "draws": number + 1}
    return {"found": False, "how": "", "draws": draws}
