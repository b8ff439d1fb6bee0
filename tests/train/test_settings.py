"""Ranks with different settings or text are refused by name, and so is a resume with other samples."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.patience import HUNG_S
from tests.support.ranks import check, run_ranks
from tests.support.torchrun import run_under_torchrun
from tests.train.tiny import flags_of, tiny
from train_runs import losses_of
from treadle.dist.groups import next_name
from treadle.dist.mesh_position import MeshPosition
from treadle.dist.rank_groups import Groups
from treadle.runtime.agreement import Claim, agree
from treadle.runtime.pipeline_options import OF_A_RANK, RunOptions, facts_of
from treadle.train import world
from treadle.train.data import open_tokens
from treadle.train.data.tokenizing import ByteTokenizer
from treadle.train.facts import OF_A_NODE, changed, digest_of_weights, settings_of
from treadle.train.main import main
from treadle.train.run_config import TrainConfig


def leaves(group: Any, prefix: str = "") -> dict[str, tuple[Any, str]]:
    """For each field of a configuration, or of options, what has it, and its name there."""
    found: dict[str, tuple[Any, str]] = {}
    for name, value in vars(group).items():
        if hasattr(value, "__dataclass_fields__") and not isinstance(group, RunOptions):
            found |= leaves(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = group, name
    return found


def with_another(config: Any, field: str) -> tuple[Any, Any]:
    """A copy in which one field has another value, and that value; whether it is allowed does not matter here."""
    copy = deepcopy(config)
    group, name = leaves(copy)[field]
    value = getattr(group, name)
    others: dict[type, Callable[[], Any]] = {
        bool: lambda: not value,
        int: lambda: value + 1,
        float: lambda: value * 2 + 1,
        tuple: lambda: (*value, 1),
    }
    other = others.get(type(value), lambda: f"not {value}")()
    object.__setattr__(group, name, other)
    return copy, other


FIELDS = list(leaves(TrainConfig()))
OPTIONS = [name for name in vars(RunOptions()) if name not in OF_A_RANK]

WALKS: list[tuple[Any, list[str], Callable[[Any], dict[str, str]]]] = [
    (TrainConfig(), FIELDS, settings_of),
    (RunOptions(), OPTIONS, facts_of),
]


def each_differs(rank: int) -> list[str]:
    """What the ranks say to each field of the configuration and each option that differs on rank 1."""
    position = MeshPosition(0, rank, (tuple(range(dist.get_world_size())),))
    groups = Groups.make(next_name(position), position, timedelta(seconds=60))
    said = []
    for config, fields, facts in WALKS:
        for field in fields:
            try:
                agree(groups, [Claim("the run", facts(with_another(config, field)[0] if rank == 1 else config))])
                said.append("")
            except ValueError as error:
                said.append(str(error))
    groups.close()
    return said


@pytest.mark.slow
def test_each_field_that_differs_on_one_rank_is_refused_by_name_with_both_values() -> None:
    one, other = check(run_ranks(2, each_differs))
    assert one == other
    host, rows = os.uname().nodename, iter(one)
    for config, fields, _ in WALKS:
        for field in fields:
            said, (group, name) = next(rows), leaves(config)[field]
            if field in OF_A_NODE and isinstance(config, TrainConfig):
                assert said == "", field
                continue
            values = [repr(getattr(group, name)), repr(with_another(config, field)[1])]
            if all(len(value) <= 100 for value in values):
                assert f"differ in {field} ({values[0]} and {values[1]}); " in said, field
            assert f"rank 0 ({host}) and rank 1 ({host}) differ in {field} (" in said, field


def test_few_fields_may_differ_and_each_has_a_reason() -> None:
    paths = {"data.paths", "data.tokenizer", "data.cache", "checkpoint.directory", "checkpoint.weights", "output"}
    assert OF_A_NODE.keys() == {*paths, "costs"}
    assert OF_A_RANK.keys() == {"address", "deadline_s", "pool_directory"}
    assert OF_A_NODE.keys() <= {*FIELDS}
    assert all(OF_A_NODE.values())


def test_weights_of_one_shape_have_different_digests(tmp_path: Path) -> None:
    for name, byte in (("a", 1), ("b", 2), ("c", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(8) + bytes([byte]) * 500_000)
    a, b, c = (digest_of_weights(str(tmp_path / name)) for name in "abc")
    assert a == c != b


def commands(rows: list[list[list[str]]]) -> list[int]:
    """Runs a rank's part of one command behind another; each finds ranks of its own number of restarts."""
    codes = []
    for number, row in enumerate(rows):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        codes.append(main(row[int(os.environ["RANK"])]))
    return codes


@pytest.mark.slow
def test_a_run_whose_ranks_have_other_text_or_settings_is_refused_on_all_of_them(tmp_path: Path) -> None:
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("[a-b]*.py")))
    for name, part in (("whole", text), ("copy", text), ("cut", text[: len(text) * 9 // 10])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "corpus.txt").write_bytes(part)

    def other_tokens(node: str) -> None:
        """Give a node a store of the same text with other tokens, as another release of a tokenizer makes it."""
        shutil.copytree(tmp_path / "whole", tmp_path / node)
        (store,) = (tmp_path / node).glob("*/store.json")
        tokens = bytes((store.parent / "training.bin").stat().st_size)
        (store.parent / "training.bin").write_bytes(tokens)
        about = json.loads(store.read_text())
        about["sha256"]["training.bin"] = hashlib.sha256(tokens).hexdigest()
        store.write_text(json.dumps(about))

    open_tokens([str(tmp_path / "whole" / "corpus.txt")], ByteTokenizer(), tmp_path / "whole")
    other_tokens("other")

    def flags(node: str, **training: Any) -> list[str]:
        corpus = (str(tmp_path / node / "corpus.txt"),)
        data, steps = (
            {"paths": corpus, "held_out": 0.0, "cache": str(tmp_path / node)},
            {"steps": 1, "warmup_steps": 0, **training},
        )
        return flags_of(tiny(tmp_path / "out", parallel={"pp": 2}, data=data, training=steps))

    rows = [
        [flags("whole"), flags("cut")],
        [flags("whole"), flags("whole", lr=1e-4)],
        [flags("whole"), flags("nowhere")],
        [flags("whole"), flags("other")],
        [flags("whole"), flags("copy")],
    ]
    ends = run_under_torchrun(2, commands, rows)
    assert check(ends) == [[2, 2, 2, 2, 0]] * 2
    cut, lr, nowhere, other = ends[0].stderr.strip().splitlines()[:4]
    assert "differ in the text and its tokens (" in cut
    assert "differ in training.lr (0.003 and 0.0001); these must be the same on all ranks" in lr
    assert "rank 1 could not start: data.paths:" in nowhere
    assert "differ in the files of data.cache (" in other
    assert list(losses_of(tmp_path / "out")) == [1]


@pytest.mark.slow
def test_a_resume_with_other_samples_is_refused_and_other_settings_are_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    start = flags_of(tiny(output, training={"steps": 1, "warmup_steps": 0}))
    assert main(start) == 0
    seen = losses_of(output)
    capfd.readouterr()
    for name, value, was in (
        ("training.seq_len", "16", "32"),
        ("training.seed", "7", "0"),
        ("data.held_out", "0.3", "0.2"),
    ):
        assert main([*start, f"--{name}", value]) == 2
        told = capfd.readouterr().err
        assert f"the checkpoint is of a run with {name} {was}, got {value}: " in told
        assert f"give --{name} {was}, another --output, or --checkpoint.no-resume" in told
    assert main([*start, "--data.paths", os.__file__]) == 2
    assert "give the text that it was trained on, another --output" in capfd.readouterr().err
    assert losses_of(output) == seen

    others = ["--training.lr", "0.001", "--optimizer.betas", "0.9", "0.99", "--training.global_batch_size", "4"]
    assert main([*start, *others, "--training.steps", "2"]) == 0
    line = capfd.readouterr().out.splitlines()[1]
    assert line.startswith(
        "changed since the checkpoint: training.steps 2 (was 1), training.global_batch_size 4 (was 8), "
    )
    assert line.endswith("training.lr 0.001 (was 0.003), optimizer.betas (0.9, 0.99) (was (0.9, 0.95))")


def test_nothing_is_said_of_a_resume_with_the_same_settings() -> None:
    settings = settings_of(TrainConfig())
    assert changed(settings, settings) is None
    assert changed({**settings, "logging.every": "7"}, settings) is None
    assert changed(settings, {}) is None


def test_settings_for_gpus_leave_those_of_the_user() -> None:
    assert world.GPU_SETTINGS["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    chosen = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512", "CUDA_DEVICE_MAX_CONNECTIONS": "16"}
    for given in ({}, dict(chosen)):
        environment = dict(given)
        world.set_for_gpus(environment)
        assert environment == (given or world.GPU_SETTINGS)


def test_torch_reads_its_allocator_settings_after_it_is_imported() -> None:
    """They are set when a run joins its world, long after the import."""
    code = (
        "import os, torch; from treadle.train.world import set_for_gpus; set_for_gpus(os.environ); "
        "print(torch._C._accelerator_getAllocatorSettings())"
    )
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HUNG_S, check=True)
    assert done.stdout.strip() == "expandable_segments:True"
