"""Updates of transformers models: after each, logits are those of the same weights loaded afresh."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from tests.support.update.workers import Asker, Spawned
from treadle.update import ClosedError, Endpoint, Source, UpdateError, UpdateOptions, Updater
from treadle.update.protocol.update_messages import Answer
from treadle.update.rank.checkpoint import read_checkpoint
from treadle.weights.buffer_sizes import Memory

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

from treadle.update.adapters.transformers import Transformers, named_weights, tied_names  # noqa: E402

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
PROMPT = torch.arange(3, 19)[None]
OPTIONS = UpdateOptions(Memory(1 << 20, target_bytes=1 << 16, least_bytes=1 << 14), deadline_s=PATIENT_S)


def make(name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    if name == "qwen3-moe":
        config = transformers.Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
        return transformers.Qwen3MoeForCausalLM(config).eval()
    config = transformers.Qwen3Config(**SMALL, tie_word_embeddings=name == "qwen3-tied")
    return transformers.Qwen3ForCausalLM(config).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        made: torch.Tensor = model(PROMPT).logits
    return made


def serve(sockets: Path, worker: int, name: str) -> Endpoint:
    """In a worker's process."""
    engine = Transformers(make(name, seed=1000 + worker))

    def answer(body: bytes) -> tuple[int, bytes]:
        with engine.serving() as version:
            return version, logits(engine.model).numpy().tobytes()

    return Endpoint(engine, sockets, worker, answer=answer)


def train(rank: int, sockets: Path, ledger: Path, name: str) -> list[tuple[int, bool]]:
    """Every rank has the whole model; each sends its share, and compares what its worker answers then."""
    seen = []
    with Updater(sockets, ledger=ledger, options=OPTIONS) as updater:
        for version in (1, 2, 3):
            updater.update(Source.of(named_weights(make(name, version))), version)
            asker = Asker(sockets, rank)
            answer = asker.ask()
            asker.close()
            assert isinstance(answer, Answer)
            seen.append((answer.version, answer.body == logits(make(name, version)).numpy().tobytes()))
    return seen


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-moe"])
def test_logits_are_those_of_a_fresh_load_three_times(name: str) -> None:
    with Spawned(2, serve, name) as workers:
        seen = check(run_ranks(2, train, workers.sockets, workers.ledger, name))
    assert seen == [[(1, True), (2, True), (3, True)]] * 2


def untied(rank: int, sockets: Path, ledger: Path) -> tuple[str, tuple[str, ...], bool]:
    """A trainer that does not tie what the engine ties; then one whose state dict has both names of one tensor."""
    with Updater(sockets, ledger=ledger, options=OPTIONS) as updater:
        told = ""
        try:
            updater.update(Source.of(named_weights(make("qwen3", 1))), 1)
        except UpdateError as error:
            told = str(error)
        torch.distributed.barrier()
        model = make("qwen3-tied", 2)
        notes = updater.update(Source.of(model.state_dict()), 2).notes
        asker = Asker(sockets, rank)
        answer = asker.ask()
        asker.close()
        assert isinstance(answer, Answer)
        return told, notes, answer.body == logits(model).numpy().tobytes()


def test_a_trainer_that_does_not_tie_what_the_engine_ties_is_refused() -> None:
    with Spawned(2, serve, "qwen3-tied") as workers:
        for told, notes, same in check(run_ranks(2, untied, workers.sockets, workers.ledger)):
            assert "engines have tied 'lm_head.weight' to 'model.embed_tokens.weight'" in told
            assert (notes, same) == ((), True)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "qwen3-moe"])
def test_weights_have_the_names_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    model = make(name, 1)
    model.save_pretrained(tmp_path)
    source = read_checkpoint(tmp_path, 0, 1)
    mine = named_weights(model)
    assert {piece.tensor for piece in source.held} == set(mine)
    assert all(torch.equal(mine[piece.tensor], held) for piece, held in source.held.items())
    assert tied_names(model) == ({"lm_head.weight": "model.embed_tokens.weight"} if name == "qwen3-tied" else {})


def test_a_checkpoint_is_read_once_by_all_ranks(tmp_path: Path) -> None:
    make("qwen3-moe", 1).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    parts = [read_checkpoint(tmp_path, rank, 3) for rank in range(3)]
    names = [piece.tensor for part in parts for piece in part.held]
    assert len(names) == len(set(names)) == len(parts[0].tensors)
    sizes = [sum(t.numel() for t in part.held.values()) for part in parts]
    largest = max(tensor.size_bytes // 4 for tensor in parts[0].tensors.values())
    assert max(sizes) <= sum(sizes) / 3 + largest
    with pytest.raises(ValueError, match="has no"):
        read_checkpoint(tmp_path / "nothing", 0, 1)


def test_generation_waits_or_breaks_off() -> None:
    engine = Transformers(make("qwen3", 1))
    with pytest.raises(ClosedError):
        engine.generate(PROMPT, max_new_tokens=2)
    engine.open(7)
    version, tokens = engine.generate(PROMPT, max_new_tokens=4, do_sample=False)
    assert (version, tokens.shape) == (7, (1, 20))
    made: list[Any] = []
    options = {"max_new_tokens": 400, "min_new_tokens": 400, "do_sample": False}
    thread = threading.Thread(target=lambda: made.append(engine.generate(PROMPT, **options)))
    thread.start()
    while not engine.gate.inside:
        time.sleep(0.001)
    assert engine.close("abort", 10.0) is None
    thread.join()
    assert made[0][1].shape[1] < 416
    assert engine.finish() is None
    engine.model._cache = object()
    assert engine.invalidate() is None
    assert engine.model._cache is None
