"""A checkpoint in the first form, whose manifest has sizes and no digests, is loaded on any layout, and that is said.

`earlier.tar.xz` has the second step of the run of `config_of`, in bfloat16 on two stages.
"""

from __future__ import annotations

import io
import tarfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.ranks import check
from tests.support.torchrun import run_under_torchrun
from tests.train.checkpoint.states import whole_state
from treadle.models.model_config import ModelConfig
from treadle.train.checkpoint import State
from treadle.train.run_config import (
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    ParallelConfig,
    TrainConfig,
    TrainingConfig,
)
from treadle.train.trainer import Trainer

ARCHIVE = Path(__file__).parent / "earlier.tar.xz"


def config_of(output: Path, **parallel: Any) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(
            vocab_size=257,
            hidden_size=2,
            num_hidden_layers=2,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=2,
            moe_intermediate_size=2,
            num_experts=2,
            num_experts_per_tok=1,
        ),
        data=DataConfig(paths=(str(output / "corpus.txt"),), held_out=0.0),
        training=TrainingConfig(
            steps=3, global_batch_size=8, seq_len=16, warmup_steps=0, eval_every=0, dtype="bfloat16"
        ),
        checkpoint=CheckpointConfig(every=1, export=False),
        logging=LoggingConfig(tensorboard=False, measure_every=0),
        parallel=ParallelConfig(**parallel),
        output=str(output),
    )


def resume(output: Path, parallel: dict[str, Any]) -> tuple[int, State, str]:
    """The step that a run goes on from, its state, and what it says; it then takes the next step."""
    said = io.StringIO()
    with redirect_stdout(said):
        trainer = Trainer(config_of(output, **parallel))
    state = {name: part.copied() for name, part in trainer.optimizer.state_dict().items()}
    resumed = trainer.step
    trainer.run()
    trainer.close()
    return resumed, state, said.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "parallel"), [(1, {}), (2, {"pp": 2}), (2, {})])
def test_a_checkpoint_without_digests_is_loaded_bit_by_bit(
    num_ranks: int, parallel: dict[str, Any], tmp_path: Path
) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "corpus.txt").write_text("the cat sat on the mat and the dog lay by the log. " * 200)
    dcp_to_torch_save(tmp_path / "checkpoints" / "step-00000002", tmp_path / "whole.pt")
    written = torch.load(tmp_path / "whole.pt")
    ranks = check(run_under_torchrun(num_ranks, resume, tmp_path, parallel))
    assert [resumed for resumed, _, _ in ranks] == [2] * num_ranks
    assert "step 2 in " in ranks[0][2]
    assert "has no digests" in ranks[0][2]
    loaded = whole_state(state for _, state, _ in ranks)
    assert loaded.keys() == written.keys()
    assert all(torch.equal(value, written[name].view_as(value)) for name, value in loaded.items())
