"""A fitted cluster, written and read, is the same cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from treadle.calibrate import cluster_text
from treadle.estimate import Cluster, load_cluster

OWN = Cluster('own "machine"', 32, 40, 1e12, 4, 1e11, 1e10, 3e10, 2, 64, {"bf16": 2e14}, {"gemm": 0.5})


@pytest.mark.parametrize(
    "before",
    [
        load_cluster("h800:256"),
        load_cluster("a100:8"),
        load_cluster("gb200"),
        replace(load_cluster("h100:16"), nic_bandwidth=25e9, peak_flops={"bf16": 9e14, "fp8": 2e15}),
        OWN,
    ],
    ids=lambda cluster: cluster.name,
)
def test_written_and_read_it_is_the_same(before: Cluster, tmp_path: Path) -> None:
    fitted = replace(before, name="ours", efficiency={**before.efficiency, "gemm_bf16": 0.1234, "step_us": 61230.0})
    text = cluster_text(fitted, before, "fitted")
    (tmp_path / "ours.toml").write_text(text)
    assert load_cluster(tmp_path / "ours.toml") == fitted
    assert text.startswith("# fitted\n")
    assert text.count("# it was") == 2


def test_a_preset_stays_a_preset() -> None:
    before = load_cluster("h800:256")
    text = cluster_text(before, before, "as it was")
    assert 'gpu = "h800"' in text
    assert "memory_bandwidth" not in text
    assert "it was" not in text.partition("\n")[2]
