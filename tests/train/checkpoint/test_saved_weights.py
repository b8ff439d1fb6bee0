"""A checkpoint's parameters as a source of updates: those that were saved, without the optimizer's state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.ranks import check, run_ranks
from tests.train.checkpoint.states import make_pipe
from treadle.train.checkpoint import Checkpointer, State, TensorPart
from treadle.train.checkpoint.saved_weights import damage, read_weights, step_of

WEIGHTS = {name: torch.arange(12.0).reshape(3, 4) + at for at, name in enumerate(("a.weight", "b.weight", "c.bias"))}


class Trained:
    """Parameters that ranks have in turn, in bfloat16, and moments in runs."""

    def __init__(self, rank: int, world: int) -> None:
        own = [name for at, name in enumerate(WEIGHTS) if at % world == rank]
        self.parts = {name: TensorPart.whole(WEIGHTS[name].bfloat16()) for name in own}
        self.parts |= {f"optim.exp_avg.{n}": TensorPart.run(torch.ones(6), 6 * rank, 6 * world) for n in WEIGHTS}

    def state_dict(self) -> State:
        return self.parts

    def load_state_dict(self, state_dict: State) -> None:
        raise AssertionError("not loaded here")


def save(rank: int, directory: Path, step: int) -> None:
    checkpoints = Checkpointer(directory, pipe=make_pipe(2))
    checkpoints.save(step, Trained(rank, 2))
    checkpoints.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    check(run_ranks(2, save, directory, 40))
    return directory / "step-00000040"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_ranks_together_read_each_parameter_once(saved: Path, world: int) -> None:
    sources = [read_weights(saved, rank, world) for rank in range(world)]
    for source in sources:
        assert source.tensors.keys() == WEIGHTS.keys()
    held = [(piece.tensor, tensor) for source in sources for piece, tensor in source.held.items()]
    assert sorted(name for name, _ in held) == sorted(WEIGHTS)
    for name, tensor in held:
        assert torch.equal(tensor, WEIGHTS[name].bfloat16())


def test_damage_is_named_and_what_is_no_checkpoint_has_no_step(saved: Path, tmp_path: Path) -> None:
    assert step_of(saved) == 40
    assert damage(saved) is None
    file = saved / "__1_0.distcp"
    content = file.read_bytes()
    try:
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert damage(saved) == "__1_0.distcp has other bytes than were written"
        file.unlink()
        assert damage(saved) == "__1_0.distcp: No such file or directory"
        with pytest.raises(ValueError, match=r"step-00000040 cannot be read: .*No such file"):
            read_weights(saved, 0, 1)
    finally:
        file.write_bytes(content)
    (tmp_path / "step-00000007").mkdir()
    assert step_of(tmp_path / "step-00000007") is None
