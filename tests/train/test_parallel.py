"""How model, schedule and batch fall on ranks, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.tiny import tiny
from treadle.train.main import main
from treadle.train.parallel import ParallelPlan, mesh_sizes
from treadle.train.run_dryrun import describe


def test_all_that_ranks_do_is_one_model_and_one_batch(tmp_path: Path) -> None:
    config = tiny(tmp_path, parallel={"pp": 2, "ep": 2, "schedule": "interleaved-overlap"})
    plan = ParallelPlan.of(config, 8)
    assert (plan.pp, plan.dp, plan.ep, plan.num_replicas) == (2, 2, 2, 4)
    assert "".join(plan.rows) == config.model.blocks
    assert sorted(stage for rank in range(2) for stage in plan.stages_of(rank).values()) == [0, 1, 2, 3]
    assert plan.num_microbatches * plan.num_replicas * config.training.micro_batch_size == 8


def test_a_layout_string_says_the_blocks_of_each_stage(tmp_path: Path) -> None:
    assert ParallelPlan.of(tiny(tmp_path, parallel={"pp": 2, "layout": "Ettt|tL"}), 2).rows == ("Ettt", "tL")
    with pytest.raises(ValueError, match=r"1f1b with pp=2 has 2 stages, got 3 in parallel.layout .*; write 1 bars"):
        ParallelPlan.of(tiny(tmp_path, parallel={"pp": 2, "layout": "Ett|t|tL"}), 2)


def test_sizes_that_are_not_the_ranks_are_refused_with_the_command(tmp_path: Path) -> None:
    parallel = tiny(tmp_path, parallel={"pp": 2, "ep": 2}).parallel
    assert mesh_sizes(parallel, 4) == (2, 1, 2)
    with pytest.raises(ValueError, match=r"2 x 1 x 2 are 4 ranks, got 6; start `torchrun --nproc-per-node 4`"):
        mesh_sizes(parallel, 6)


def test_a_command_that_does_not_fit_ends_with_one_line_and_code_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for flags, told in (
        ("--parallel.pp 2", "2 x 1 x 1 are 2 ranks, got 1"),
        ("--parallel.ppp 2", "did you mean '--parallel.pp'?"),
        ("--model.vocab_size 100 --data.paths stdlib", "more than model.vocab_size 100"),
    ):
        assert main([*flags.split(), "--output", str(tmp_path)]) == 2
        line = capfd.readouterr().err
        assert told in line
        assert line.count("\n") == 1


@pytest.mark.slow
def test_a_dry_run_names_every_stage(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tiny(tmp_path, parallel={"pp": 2, "ep": 2, "schedule": "interleaved-overlap"})
    assert "1:t 3:tL" in str(describe(config))
    assert main(["--dry-run", "--parallel.pp", "4", "--output", str(tmp_path / "none")]) == 0
    assert "3:" in capfd.readouterr().out
    assert not (tmp_path / "none").exists()
