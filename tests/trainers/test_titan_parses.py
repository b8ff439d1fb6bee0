"""torchtitan's own configuration classes parse what is written for it; `.ci/torchtitan` has the environment."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.random_jobs import same
from treadle.estimate import Job, load_cluster, load_model
from treadle.passes.cut import cut_evenly
from treadle.trainers import TRAINERS, read_job

JOBS: list[dict[str, Any]] = [
    {"tp": 2, "pp": 1, "sharding": "parameters", "recompute": ("full",)},
    {"tp": 2, "pp": 4, "sharding": "gradients"},
    {"pp": 4, "vpp": 2, "schedule": "interleaved", "sharding": "parameters", "recompute": ("full",)},
    {"pp": 2, "vpp": 2, "schedule": "zb-v", "sharding": "gradients"},
    {"tp": 4, "cp": 2, "pp": 1, "sharding": "parameters", "sequence_parallel": False, "cuda_graph": "whole"},
]


@pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None,
    reason="torchtitan is not installed here; .ci/torchtitan runs these tests where it is",
)
@pytest.mark.slow
@pytest.mark.parametrize("given", JOBS, ids=lambda given: "-".join(map(str, given.values())))
def test_torchtitan_parses_what_is_written_and_its_saved_configuration_is_the_same_job(
    given: dict[str, Any], tmp_path: Path
) -> None:
    manager = importlib.import_module("torchtitan.config.manager")
    model, cluster = load_model("llama3-8b"), load_cluster("h100:16")
    job = Job(model, cluster, global_batch_size=64, seq_len=8192, **given)
    job = Job(**{**vars(job), "layout": cut_evenly(model.blocks, job.num_stages)})
    script = TRAINERS["torchtitan"].launch(job)
    (tmp_path / "launch.sh").write_text(script)
    assert same(read_job(tmp_path / "launch.sh", cluster).job) == same(job)
    words = shlex.split(re.sub(r"\\\n", " ", script), comments=True)
    config = manager.ConfigManager().parse_args(words[words.index("torchtitan.train") + 1 :])
    (tmp_path / "saved.json").write_text(json.dumps(config.to_dict()))
    read = read_job(tmp_path / "saved.json", cluster)
    assert read.trainer == "torchtitan"
    assert same(read.job) == same(job)
