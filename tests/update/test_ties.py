"""Names that an engine has tied: a source that has other weights under one of them is refused, wherever they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.devices import here
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from tests.support.update.engines import SMALL
from tests.support.update.workers import Asker, Spawned
from treadle.update import Endpoint, Plain, Source, UpdateError, UpdateOptions, Updater
from treadle.update.protocol.update_messages import Answer
from treadle.weights.tensor_boxes import Box, Piece, Tensor

OPTIONS = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=1, compare_sources="off")
SHAPE = 96, 8


def serve(sockets: Path, worker: int) -> Endpoint:
    """Worker 0 ties its head to its embedding, worker 1 has no head."""
    held = {"embed": torch.zeros(SHAPE), "norm": torch.zeros(8)}
    engine = Plain(held, tied={"head": "embed"} if worker == 0 else None)

    def answer(body: bytes) -> tuple[int, bytes]:
        with engine.serving() as version:
            return version, engine.held["embed"].cpu().numpy().tobytes()

    return Endpoint(engine, sockets, worker, answer=answer)


def weights(version: int) -> dict[str, torch.Tensor]:
    made = torch.Generator("cpu").manual_seed(version)
    return {name: here(torch.rand(SHAPE, generator=made, device="cpu")) for name in ("embed", "head")} | {
        "norm": torch.ones(8)
    }


def rows(names: dict[str, torch.Tensor], first: int, last: int, *, whole: dict[str, torch.Tensor]) -> Source:
    """A source of some rows of its tensors, of all of the others."""
    tensors = {n: Tensor(n, tuple(t.shape), "float32") for n, t in (names | whole).items()}
    held = {Piece(n, Box((first, 0), (last, 8))): t[first:last] for n, t in names.items()}
    return Source(tensors, held | {Piece(n, Box.whole(tuple(t.shape))): t for n, t in whole.items()})


def ends(embed: torch.Tensor, head: torch.Tensor, rank: int) -> Source:
    """The embedding is on rank 0, the head on rank 1, as of the first and the last stage."""
    mine: dict[str, torch.Tensor] = {"embed": embed, "norm": torch.ones(8)} if rank == 0 else {"head": head}
    return Source.of(mine)


def run(rank: int, sockets: Path, ledger: Path) -> dict[str, Any]:
    """The notes or the error of each source, each as the next version."""
    version, told = 0, dict[str, Any]()
    with Updater(sockets, ledger=ledger, options=OPTIONS) as updater:

        def case(name: str, source: Source, **only: Any) -> None:
            nonlocal version
            version += 1
            try:
                told[name] = updater.update(source, version, **only).notes
            except UpdateError as error:
                told[name] = str(error)
            torch.distributed.barrier()

        both = weights(3)
        embed, head, other = both["embed"], both["head"], both["embed"].clone()
        other[70, 3] += 1
        case("more than is wanted", Source.of({**weights(1), "head": weights(1)["embed"], "rope": torch.ones(3)}))
        case("untied", Source.of(both))
        case("another shape", Source.of({**both, "head": torch.zeros(3, 8)}))
        case("one memory", Source.of({**both, "head": embed}))
        case("a copy", Source.of({**both, "head": embed.clone()}))
        case("one element", Source.of({**both, "head": other}))
        cut = slice(48 * rank, 48 * rank + 48)
        case("shards", rows({"embed": embed, "head": other}, cut.start, cut.stop, whole={"norm": torch.ones(8)}))
        case("ends", ends(embed, head, rank))
        case("ends, one element", ends(embed, other, rank))
        case("ends alike", ends(embed, embed.clone(), rank))
        case("changed", Source.of({**both, "norm": torch.zeros(8)}), changed=["norm"], base=version)
        case("changed tied", Source.of(both), changed=["embed"], base=version)
        asker = Asker(sockets, rank)
        answer = asker.ask()
        asker.close()
        assert isinstance(answer, Answer)
        told["served"] = answer.version, answer.body == embed.cpu().numpy().tobytes()
    return told


@pytest.mark.slow
def test_what_engines_tie_is_compared_and_what_nobody_takes_is_named() -> None:
    with Spawned(2, serve) as workers:
        first, second = check(run_ranks(2, run, workers.sockets, workers.ledger))
    refused = {"untied", "another shape", "one element", "shards", "ends", "ends, one element", "changed tied"}
    for told in (first, second):
        assert {name for name, text in told.items() if isinstance(text, str)} == refused, told
        assert told["more than is wanted"] == ("no worker wants a tensor that the source has, not sent: 'rope'",)
        assert all(told[name] == () for name in ("one memory", "a copy", "ends alike", "changed"))
        for name in refused - {"another shape"}:
            assert "engines have tied 'head' to 'embed' and take the latter for both" in told[name], told[name]
            assert "tie_word_embeddings=False" in told[name]
        assert "the source has float32 (3, 8) and float32 (96, 8)" in told["another shape"]
        for name in ("untied", "one element", "shards", "changed tied"):
            assert "in phase plan" in told[name], "before any worker closed"
        assert told["ends"].startswith("update rank 1, in phase load")
        assert told["served"] == (11, True)
