"""Checkpoints of `treadle.models`: a tied head, an MTP block that shares it, and routers' biases, on other layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import treadle
from tests.models.runs import rows_of
from tests.models.tiny import QWEN3_MOE
from tests.support.devices import DEVICE_TYPE, device_of
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from tests.train.checkpoint.states import whole_state
from tests.train.layouts import Layout, put_gradients
from treadle.models import ModelConfig, build_stages, loss_fn, tied_parameters, views_of_stages
from treadle.train.checkpoint import Checkpointer, State
from treadle.train.optim import OptimizerConfig, ShardedOptimizer

LAYOUTS = [Layout(pp=2, ep=2), Layout("dualpipe", pp=2, ep=2), Layout(ep=2, dp=2)]


def model() -> ModelConfig:
    return replace(
        QWEN3_MOE,
        num_hidden_layers=2,
        tie_word_embeddings=True,
        scoring="sigmoid",
        num_nextn_predict_layers=1,
        n_shared_experts=1,
    )


def save_or_load(rank: int, layout: Layout, number: int, directory: Path) -> State:
    """The first layout trains and saves; each next one loads what the one before saved, and saves it."""
    mesh = init_device_mesh(DEVICE_TYPE, (layout.pp, layout.dp, layout.ep), mesh_dim_names=("pp", "dp", "ep"))
    config, schedule = model(), layout.schedule
    rows = rows_of(config, schedule.placement.num_stages)
    at = dict(enumerate(schedule.placement.stages[mesh.get_local_rank("pp")]))
    options: dict[str, Any] = {"dtype": torch.bfloat16, "seed": number, "device": device_of(rank)}
    stages = build_stages(config, rows, at, ep=layout.ep, ep_rank=mesh.get_local_rank("ep"), **options)
    tied = tied_parameters(config, rows)
    pipe = treadle.Pipeline(stages, schedule, mesh=mesh, loss_fn=loss_fn, tied=tied, deadline_s=PATIENT_S)
    optimizer = ShardedOptimizer(pipe, views_of_stages(stages), OptimizerConfig(name="muon"))
    checkpoints = Checkpointer(directory, pipe=pipe, keep=1)
    if number == 0:
        for step in range(2):
            put_gradients(optimizer, step)
            optimizer.step(0.05)
            optimizer.zero_grad()
    else:
        assert checkpoints.load(number - 1, optimizer) == {"number": number - 1}
    checkpoints.save(number, optimizer, {"number": number})
    checkpoints.close()
    pipe.close()
    return {name: part.copied() for name, part in optimizer.state_dict().items()}


def run_all(rank: int, directory: Path) -> list[State]:
    return [save_or_load(rank, layout, number, directory) for number, layout in enumerate(LAYOUTS)]


@pytest.mark.slow
def test_models_are_loaded_on_other_layouts_to_the_last_bit(tmp_path: Path) -> None:
    ranks = check(run_ranks(4, run_all, tmp_path))
    (alone,) = check(run_ranks(1, save_or_load, Layout(), len(LAYOUTS), tmp_path))
    wanted = whole_state(of_rank[0] for of_rank in ranks)
    assert "lm_head.weight" not in wanted
    assert any(name.endswith("e_score_correction_bias") for name in wanted)
    assert any(name.startswith("optim.momentum_buffer.model.layers.2.") for name in wanted), "the MTP block"
    for number, layout in [*enumerate(LAYOUTS), (None, Layout())]:
        got = whole_state([alone] if number is None else [of_rank[number] for of_rank in ranks])
        assert got.keys() == wanted.keys(), layout
        for name, value in wanted.items():
            assert torch.equal(got[name], value), (layout, name)
