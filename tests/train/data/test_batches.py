"""Samples, batches and their order: every sample once an epoch, the same micro-batches on every layout, resumable."""

from __future__ import annotations

import json
import sysconfig
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.train.data import IGNORED, Batch, PackedTokens, evaluation_batches, open_tokens, training_loader
from treadle.train.data.sampling import GlobalBatches
from treadle.train.data.tokenizing import ByteTokenizer

STDLIB = Path(sysconfig.get_paths()["stdlib"])


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedTokens:
    paths = [str(STDLIB / name) for name in ("bisect.py", "this.py", "stat.py")]
    return open_tokens(paths, ByteTokenizer(), tmp_path_factory.mktemp("cache")).training(64)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 10))
def test_samples_are_the_documents_one_after_the_other(lengths: list[int], seq_len: int) -> None:
    documents = np.repeat(np.arange(len(lengths)), lengths)
    tokens = 1000 + np.arange(len(documents))
    starts = np.cumsum([0, *lengths[:-1]])
    packed = PackedTokens(tokens, starts, seq_len)
    for index in range(len(packed)):
        sample = packed.sample(index)
        places = range(index * seq_len, index * seq_len + seq_len)
        for at, place in enumerate(places):
            alone = documents[place + 1] != documents[place]
            assert sample.inputs[at] == tokens[place]
            assert sample.targets[at] == (IGNORED if alone else tokens[place + 1])
            assert sample.positions[at] == place - max(starts[documents[place]], places[0])
            assert sample.documents[at] == documents[place] - documents[places[0]]
    everything = np.arange(len(packed))
    if len(packed):
        assert packed.num_targets(everything) == int((packed.samples(everything).targets != IGNORED).sum())


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 3))
def test_every_sample_comes_once_an_epoch(num_samples: int, size: int, seed: int) -> None:
    batches = GlobalBatches(num_samples, size, seed)
    epochs = 3
    taken = np.concatenate(list(islice(batches, -(-epochs * num_samples // size))))[: epochs * num_samples]
    for epoch in taken.reshape(epochs, num_samples):
        assert sorted(epoch.tolist()) == list(range(num_samples))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [GlobalBatches(50, 50, seed).at(epoch * 50).tolist() for seed in range(2) for epoch in range(2)]
    assert len({tuple(order) for order in orders}) == 4


def test_a_run_resumes_at_any_step_with_the_same_batches(packed: PackedTokens) -> None:
    def loader(**layout: int) -> Any:
        return training_loader(packed, batch_size=8, seed=3, **layout)

    undisturbed = list(islice(loader(), 60))  # more than an epoch
    assert 2 * len(packed) < 8 * 60
    for step in (0, 1, 17, 44):
        first = loader()
        steps = iter(first)
        for _ in range(step):
            next(steps)
        state = json.loads(json.dumps(first.state_dict()))
        again = loader()
        again.load_state_dict(state)
        _same_batches(list(islice(again, 4)), undisturbed[step : step + 4])


def test_layouts_see_the_same_micro_batches_and_resume_on_each_other(packed: PackedTokens) -> None:
    whole = list(islice(training_loader(packed, batch_size=8, seed=3), 12))
    state: Any = None
    step = 0
    for num_replicas in (4, 2, 1, 8):  # three steps each
        replicas = [
            training_loader(packed, batch_size=8, seed=3, replica=replica, num_replicas=num_replicas)
            for replica in range(num_replicas)
        ]
        for loader in replicas if state is not None else ():
            loader.load_state_dict(state)
        rows = zip(*(islice(loader, 3) for loader in replicas), strict=True)
        for parts in rows:
            together = torch.cat([part.inputs for part in parts])
            assert torch.equal(together, whole[step].inputs)
            assert {part.num_tokens for part in parts} == {whole[step].num_tokens}
            step += 1
        states = [loader.state_dict() for loader in replicas]
        state = states[0]
        assert all(other == state for other in states)


def test_evaluation_covers_every_sample_once_and_fills_up_with_nothing(packed: PackedTokens) -> None:
    batches = [list(evaluation_batches(packed, batch_size=12, replica=r, num_replicas=2)) for r in range(2)]
    inputs = torch.cat([half.inputs for pair in zip(*batches, strict=True) for half in pair])
    num, everything = len(packed), packed.samples(np.arange(len(packed)))
    assert num % 12 != 0
    assert torch.equal(inputs[:num], everything.inputs)
    assert sum(batch.num_tokens for batch in batches[0]) == int((everything.targets != IGNORED).sum())
    last = torch.cat([half[-1].targets for half in batches])
    assert bool((last[num % 12 :] == IGNORED).all())
    assert len(list(evaluation_batches(packed, batch_size=12, most=2))) == 2


def test_too_little_text_is_refused() -> None:
    nothing = PackedTokens(np.zeros(5, np.uint16), np.zeros(1, np.int64), seq_len=8)
    with pytest.raises(ValueError, match="no whole sample to train on"):
        training_loader(nothing, batch_size=1, seed=0)


def _same_batches(got: list[Batch], wanted: list[Batch]) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
        assert one.num_tokens == other.num_tokens
