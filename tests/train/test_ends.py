"""How a command ends that cannot go on: one line, on the rank that has the error; and what does not end it."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
from concurrent.futures import wait
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.cases import refusal
from tests.support.ranks import check, run_ranks
from tests.support.torchrun import run_under_torchrun
from tests.train.tiny import flags_of, tiny
from train_runs import losses_of
from treadle.train import trainer
from treadle.train.checkpoint import SaveError, complete_steps
from treadle.train.main import FAILED, REFUSED, main
from treadle.train.run_log import StepFacts
from treadle.train.trainer import Trainer

pytestmark = pytest.mark.slow


def run_with(paths: dict[str, str], output: Path) -> int:
    """The command, with other text on some ranks."""
    config = tiny(output, parallel={"pp": 2, "deadline_s": 20.0})
    text = paths.get(os.environ["RANK"], config.data.paths[0])
    return main([*flags_of(config), "--data.paths", text])


def test_an_error_of_one_rank_is_that_ranks_line(tmp_path: Path) -> None:
    _, second = run_under_torchrun(2, run_with, {"1": "nowhere/*.txt"}, tmp_path / "one", stuck=(0,))
    assert second.value == REFUSED, str(second)
    (line,) = second.stderr.splitlines()
    assert line.startswith("error: rank 1: data.paths: 'nowhere/*.txt' names no file")


def test_an_error_of_all_ranks_is_one_line(tmp_path: Path) -> None:
    outcomes = run_under_torchrun(2, run_with, {"0": "nowhere/*.txt", "1": "nowhere/*.txt"}, tmp_path / "all")
    assert [outcome.value for outcome in outcomes] == [REFUSED, REFUSED]
    assert [len(outcome.stderr.splitlines()) for outcome in outcomes] == [1, 0]
    assert outcomes[0].stderr.startswith("error: data.paths: ")


def lose_rank_1(output: Path) -> int:
    """The command, whose rank 1 is killed where it would make its pipeline."""
    if os.environ["RANK"] == "1":
        trainer.Pipeline = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[attr-defined, assignment]
    return main(flags_of(tiny(output, parallel={"pp": 2, "deadline_s": 20.0})))


def test_a_rank_that_is_lost_while_a_run_is_made_is_one_line(tmp_path: Path) -> None:
    first, second = run_under_torchrun(2, lose_rank_1, tmp_path)
    assert second.exitcode == -signal.SIGKILL
    assert first.value == FAILED, str(first)
    (line,) = [each for each in first.stderr.splitlines() if not each.startswith("[rank")]
    assert line.startswith("error: rank 0: ")
    assert "rank 1" in line


def run_in_a_world_of_a_device(output: Path) -> int:
    """The trainer in a world that has no backend for the CPU, as init_process_group("nccl") makes it."""
    dist.init_process_group("cuda:gloo")
    run = Trainer(tiny(output, training={"steps": 2}, parallel={"dp": 2}))
    run.run()
    run.close()
    return run.step


def test_a_run_takes_a_world_without_a_backend_for_the_cpu(tmp_path: Path) -> None:
    assert check(run_under_torchrun(2, run_in_a_world_of_a_device, tmp_path)) == [2, 2]


def run_on_a_full_disk(rank: int, output: Path) -> tuple[str, str]:
    """The kernel refuses files above 100 KB while steps 2 and 6 are saved."""
    limits, told = resource.getrlimit(resource.RLIMIT_FSIZE), StringIO()

    def fill_disk(facts: StepFacts) -> None:
        if run.checkpoints._saving is not None:
            wait([run.checkpoints._saving])
        soft = 100_000 if facts.step in (1, 5) else limits[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, limits[1]))

    with redirect_stdout(told):
        run = Trainer(tiny(output))
        try:
            run.run(after_step=fill_disk)
            raised = "nothing"
        except SaveError as error:
            raised = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        run.close()
    return told.getvalue(), raised


def test_a_run_goes_on_where_a_checkpoint_cannot_be_saved(tmp_path: Path) -> None:
    ((told, raised),) = check(run_ranks(1, run_on_a_full_disk, tmp_path))
    assert len(re.findall(r"^the checkpoint of step 2 in .* is not complete, .*too large.*$", told, re.MULTILINE)) == 1
    assert "Traceback" not in told
    assert sorted(losses_of(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert "the checkpoint of step 6 in " in raised
    assert raised.endswith("complete are the steps 4")
    assert complete_steps(tmp_path / "checkpoints") == [4]
    assert not list((tmp_path / "checkpoints").glob("*.partial"))


def start_twice(rank: int, output: Path) -> str:
    first = Trainer(tiny(output))
    said = refusal(lambda: Trainer(tiny(output, training={"seed": 1})))
    first.close()
    return said


def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    (said,) = check(run_ranks(1, start_twice, tmp_path))
    assert re.search(r"checkpoints is in use by another run \(process \d+ on ", said)
    assert "choose another directory with --output or --checkpoint.directory" in said


def train_on_empty_documents(rank: int, directory: Path) -> tuple[list[str], str]:
    """Two starts of a run, most of whose batches have no token to predict."""
    told = StringIO()
    (directory / "some.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in ["abcdefgh"] * 4 + [""] * 60))
    (directory / "none.jsonl").write_text('{"text": ""}\n' * 60)
    with redirect_stdout(told):
        for steps in (4, 8):
            run = Trainer(
                tiny(
                    directory / "run",
                    data={"paths": (str(directory / "some.jsonl"),), "held_out": 0.0},
                    training={"steps": steps, "global_batch_size": 1, "seq_len": 8},
                )
            )
            run.run()
            run.close()
    none = {"paths": (str(directory / "none.jsonl"),), "held_out": 0.0}
    said = refusal(lambda: Trainer(tiny(directory / "none", data=none, training={"seq_len": 8})))
    return told.getvalue().splitlines(), said


def test_batches_without_a_token_to_predict_are_skipped(tmp_path: Path) -> None:
    ((told, said),) = check(run_ranks(1, train_on_empty_documents, tmp_path))
    assert sorted(losses_of(tmp_path / "run")) == list(range(1, 9))
    skipped = [line for line in told if line.endswith("a batch of documents without tokens is skipped")]
    assert len(skipped) > 8
    assert any(line.endswith("resumed at step 4") for line in told)
    assert "have only empty documents: there is no token to predict" in said


def test_a_run_without_an_option_for_model_or_data_trains(tmp_path: Path) -> None:
    assert main(["--training.steps", "2", "--training.global_batch_size", "2", "--output", str(tmp_path)]) == 0
    assert sorted(losses_of(tmp_path)) == [1, 2]
