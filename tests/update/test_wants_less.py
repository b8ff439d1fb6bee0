"""An engine that wants other boxes once it was loaded, as a worker of vLLM does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.ranks import check, run_ranks
from tests.support.update.engines import OPTIONS
from treadle.update import Endpoint, Plain, Source, UpdateError, Updater
from treadle.update.protocol.update_messages import WeightLayout
from treadle.update.worker.arrived_boxes import Arrival
from treadle.weights.tensor_boxes import Box, Piece, Tensor

pytestmark = pytest.mark.slow

ROWS, COLUMNS = 8, 64
WHOLE, CUT, WIDER = Box((0, 0), (8, 64)), Box((2, 0), (4, 64)), Box((2, 0), (6, 64))
UNREAD = Piece("unread", Box.whole((16,)))


class Narrowing(Plain):
    """Keeps rows 2 and 3 of a matrix; it cannot export, and wants no more than these once it was loaded.

    `fails`: `finish` fails once, of which it may want more, as an engine does that has read more than came.
    """

    can_export, whole = False, True

    def __init__(self) -> None:
        super().__init__({"w": torch.zeros(ROWS, COLUMNS)})
        self.wants = self.at((Piece("w", WHOLE), UNREAD))
        self.came: list[str] = []
        self.box = CUT
        self.fails = False

    def at(self, pieces: tuple[Piece, ...]) -> WeightLayout:
        return WeightLayout((Tensor("w", (ROWS, COLUMNS), "float32"), Tensor("unread", (16,), "float32")), pieces)

    def layout(self) -> WeightLayout:
        return self.wants

    def begin(self) -> str | None:
        self.came = []
        return None

    def load(self, arrivals: Sequence[Arrival]) -> str | None:
        for arrival in arrivals:
            self.came.append(f"{arrival.name} {arrival.box}")
            if arrival.name == "w":
                arrival.copy_into(self.held["w"][arrival.box.slices(WHOLE)])
        return None

    def finish(self) -> str | None:
        self.wants = self.at((Piece("w", self.box),))
        if self.fails:
            self.fails = False
            return "failed"
        return None


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((ROWS, COLUMNS), float(version)), "unread": torch.full((16,), float(version))}


def life(rank: int, directory: Path) -> list[tuple[float, str]]:
    """After each attempt: what the engine holds, and the pieces of the last load."""
    engine = Narrowing()
    seen = []
    with (
        Endpoint(engine, directory, 0),
        Updater(directory, ledger=directory / "ledger", options=replace(OPTIONS, rollback="host")) as updater,
    ):
        for version in range(1, 8):
            engine.fails = version in (2, 4, 5)
            if version == 5:
                engine.box = WIDER
            try:
                updater.update(Source.of(weights(version)), version)
            except UpdateError:
                assert version in (2, 4, 5)
            else:
                assert version in (1, 3, 6, 7)
            assert engine.gate.version is not None
            seen.append((float(engine.held["w"][2, 0]), ", ".join(engine.came)))
    return seen


def test_a_worker_is_brought_what_its_engine_wants_by_then(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (seen,) = check(run_ranks(1, life, tmp_path))
    whole, cut, wider = f"w {WHOLE}, unread [0:16]", f"w {CUT}", f"w {WIDER}"
    assert seen == [
        (1.0, whole),
        (1.0, whole),  # it went back, to what had come whole
        (3.0, cut),
        (3.0, cut),  # it went back, to what had come cut
        (3.0, cut),  # and again, though its engine wants more from here on
        (6.0, wider),
        (7.0, wider),
    ]
