"""A checkpoint of one layout, loaded on others: parameters, masters and moments are the same to the last bit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.cases import refusal
from tests.support.ranks import check, run_ranks
from tests.train.checkpoint.states import whole_state
from tests.train.layouts import Layout, Placed, place, put_gradients
from treadle.train.checkpoint import Checkpointer, State
from treadle.train.checkpoint.planners import PartCopies, shared_out
from treadle.train.optim import OptimizerConfig, ShardedOptimizer

EXTRA = {"step": 3, "data": {"epoch": 1, "at": [1, 2]}, "rng": "00ff"}


@dataclass(frozen=True)
class Kind:
    config: OptimizerConfig
    dtype: torch.dtype

    @property
    def directory(self) -> str:
        return f"{self.config.name} {self.dtype}"


KINDS = [
    Kind(OptimizerConfig(bucket_mb=0.001), torch.float64),
    Kind(OptimizerConfig(name="muon", bucket_mb=0.001), torch.bfloat16),
]
CHAIN = [Layout(pp=2, ep=2), Layout(ep=2, dp=2), Layout(pp=4)]


def update(placed: Placed, optimizer: ShardedOptimizer, step: int) -> None:
    put_gradients(optimizer, step)
    optimizer.step(0.05)
    optimizer.zero_grad()


def own_state(optimizer: ShardedOptimizer) -> State:
    return {name: part.copied() for name, part in optimizer.state_dict().items()}


def save_first(rank: int, kind: Kind, directory: Path) -> State:
    """Trains, saves, and trains on at once: the checkpoint is of the moment of the save."""
    placed = place(rank, CHAIN[0], kind.dtype)
    optimizer = ShardedOptimizer(placed.pipe, placed.views, kind.config)
    checkpoints = Checkpointer(directory, pipe=placed.pipe)
    assert checkpoints.latest() is None
    for step in range(3):
        update(placed, optimizer, step)
    saved = own_state(optimizer)
    checkpoints.save(0, optimizer, EXTRA)
    update(placed, optimizer, 3)
    checkpoints.wait()
    moved = own_state(optimizer)
    assert all(
        not torch.equal(part.tensor, saved[name].tensor)
        for name, part in moved.items()
        if "norm" in name and not name.startswith("optim.step")
    )
    placed.pipe.close()
    return saved


def load_and_save(rank: int, number: int, layout: Layout, kind: Kind, directory: Path) -> tuple[State, Any]:
    """Loads the newest checkpoint, which another layout saved, and saves it again."""
    placed = place(rank, layout, kind.dtype)
    with torch.no_grad():
        for stage in placed.stages.values():
            for tensor in stage.parameters():
                tensor.zero_()
    optimizer = ShardedOptimizer(placed.pipe, placed.views, kind.config)
    checkpoints = Checkpointer(directory, pipe=placed.pipe)
    assert checkpoints.latest() == number - 1
    extra = checkpoints.load(number - 1, optimizer)
    checkpoints.save(number, optimizer, extra)
    checkpoints.wait()
    for view in placed.views:  # each object of the tied parameter, whatever its name here
        if view.name == "lm_head.weight":
            assert torch.equal(view.tensor, optimizer.state_dict()["model.embed_tokens.weight"].tensor)
    placed.pipe.close()
    return own_state(optimizer), extra


def stage_once(rank: int, directory: Path) -> tuple[list[tuple[str, tuple[int, ...], int]], int]:
    """The parts that a rank copies in a save, and the bytes of those that it holds."""
    placed = place(rank, Layout(ep=2, dp=2), torch.float64)
    optimizer = ShardedOptimizer(placed.pipe, placed.views, KINDS[0].config)
    update(placed, optimizer, 0)
    checkpoints, stage = Checkpointer(directory, pipe=placed.pipe), PartCopies.stage
    staged: list[tuple[str, tuple[int, ...], int]] = []

    def noted(stager: PartCopies, state: dict[str, Any]) -> dict[str, Any]:
        staged.extend((name, part.offset, part.size_bytes) for name, part in state["parts"].items())
        return stage(stager, state)

    with mock.patch.object(PartCopies, "stage", noted):
        checkpoints.save(0, optimizer)
        checkpoints.wait()
    held_bytes = sum(part.size_bytes for part in optimizer.state_dict().values())
    checkpoints.close()
    placed.pipe.close()
    return staged, held_bytes


@pytest.mark.slow
def test_replicas_copy_each_part_once(tmp_path: Path) -> None:
    ranks = check(run_ranks(4, stage_once, tmp_path))
    staged = [(name, offset) for parts, _ in ranks for name, offset, _ in parts]
    assert len(staged) == len(set(staged))
    assert len(saved_names(tmp_path)) == len({name for name, _ in staged})
    sizes = [sum(size_bytes for *_, size_bytes in parts) for parts, _ in ranks]
    assert max(sizes) < 0.7 * min(held_bytes for _, held_bytes in ranks)
    assert max(sizes) - min(sizes) < 0.05 * max(sizes), sizes


def saved_names(directory: Path) -> set[str]:
    (path,) = directory.glob("*/.metadata")
    return set(FileSystemReader(path.parent).read_metadata().state_dict_metadata)


def test_parts_are_shared_out_by_bytes() -> None:
    both, first = [("a", (0,), 6), ("b", (0,), 5), ("c", (0,), 1)], [("own", (0,), 4)]
    assert shared_out([[*first, *both], both]) == [{"own", "b"}, {"a", "c"}]


def run_chain(rank: int, directory: Path) -> list[list[tuple[State, Any]]]:
    found = []
    for kind in KINDS:
        here = directory / kind.directory
        states = [(save_first(rank, kind, here), EXTRA)]
        for number, layout in enumerate(CHAIN[1:], 1):
            states.append(load_and_save(rank, number, layout, kind, here))
        found.append(states)
    return found


def run_alone(rank: int, directory: Path) -> list[tuple[State, Any, str]]:
    return [
        (
            *load_and_save(rank, len(CHAIN), Layout(), kind, directory / kind.directory),
            refusal(partial(load_other, kind, directory / other.directory)),
        )
        for kind, other in zip(KINDS, reversed(KINDS), strict=True)
    ]


def load_other(kind: Kind, directory: Path) -> None:
    """A checkpoint of another optimizer and type."""
    placed = place(0, Layout(), kind.dtype)
    optimizer = ShardedOptimizer(placed.pipe, placed.views, kind.config)
    checkpoints = Checkpointer(directory, pipe=placed.pipe)
    latest = checkpoints.latest()
    assert latest is not None
    checkpoints.load(latest, optimizer)


@pytest.mark.slow
def test_each_layout_loads_what_another_saved(tmp_path: Path) -> None:
    ranks = check(run_ranks(4, run_chain, tmp_path))
    (alone,) = check(run_ranks(1, run_alone, tmp_path))
    for number, kind in enumerate(KINDS):
        wanted = whole_state(of_rank[number][0][0] for of_rank in ranks)
        hold_names(kind, wanted)
        for at, layout in enumerate(CHAIN):
            hold_same(whole_state(of_rank[number][at][0] for of_rank in ranks), wanted, layout)
            assert all(of_rank[number][at][1] == EXTRA for of_rank in ranks)
        hold_same(alone[number][0], wanted, Layout())
        assert alone[number][1] == EXTRA
    assert "it has no optim.exp_avg.model.layers.0.experts.0.down_proj.weight, " in alone[0][2]
    assert "it has no optim.master.model.embed_tokens.weight, " in alone[1][2]
    hold_readable_by_torch(tmp_path / KINDS[0].directory / f"step-{len(CHAIN):08d}", tmp_path, alone[0][0])


def hold_same(got: Any, wanted: dict[str, Tensor], layout: Layout) -> None:
    whole = whole_state([got]) if any(hasattr(part, "offset") for part in got.values()) else got
    assert whole.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(whole[name], value), (layout, name)


def hold_names(kind: Kind, state: dict[str, Tensor]) -> None:
    moments = "exp_avg" if kind.config.name == "adamw" else "momentum_buffer"
    assert "lm_head.weight" not in state, "it is the embedding's"
    assert f"optim.{moments}.model.layers.3.experts.2.up_proj.weight" in state
    assert ("optim.master.model.norm.bias" in state) == (kind.dtype == torch.bfloat16)
    assert "model.layers.0.mixer.frozen" in state
    assert "optim.exp_avg.model.layers.0.mixer.frozen" not in state
    assert int(state["optim.step.model.layers.0.mixer.rare"]) == 1, "updated in one of three steps"
    assert int(state["optim.step.model.norm.bias"]) == 3


def hold_readable_by_torch(directory: Path, tmp_path: Path, wanted: State) -> None:
    dcp_to_torch_save(directory, tmp_path / "whole.pt")
    read = torch.load(tmp_path / "whole.pt", weights_only=True)
    hold_same(read, whole_state([wanted]), Layout())
