"""Presets have the sizes that are published, and parameters add up to the published totals."""

from __future__ import annotations

from itertools import pairwise

import pytest

from treadle.estimate import load_cluster, load_model
from treadle.estimate.cluster import PRESETS as CLUSTERS
from treadle.estimate.model_shape import PRESETS as MODELS
from treadle.estimate.parameter_counts import active_parameters, count_parameters

TOTALS = {
    "gpt3-175b": 174.6e9,  # GPT-3's paper: 175.0B, rounded
    "llama3-8b": 8.03e9,
    "llama3-70b": 70.6e9,
    "llama3-405b": 405.0e9,
    "deepseek-v2": 236e9,
    "deepseek-v3": 671e9,
    "kimi-k2": 1.0264e12,  # what its weight files hold; the paper says 1.04T
    "qwen3-30b-a3b": 30.5e9,
    "qwen3-235b-a22b": 235e9,
    "gpt-oss-120b": 116.83e9,
}
ACTIVE = {  # with the input embedding or without it, as the publisher counts
    "deepseek-v2": (21.4e9, True),
    "deepseek-v3": (36.7e9, False),
    "kimi-k2": (32.6e9, True),
    "qwen3-30b-a3b": (3.35e9, True),
    "qwen3-235b-a22b": (22e9, True),
    "gpt-oss-120b": (5.13e9, False),
}


@pytest.mark.parametrize("name", TOTALS)
def test_totals_are_the_published_ones(name: str) -> None:
    assert count_parameters(load_model(name)) == pytest.approx(TOTALS[name], rel=0.01)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_the_published_ones(name: str) -> None:
    published, embedding = ACTIVE[name]
    assert active_parameters(load_model(name), embedding=embedding) == pytest.approx(published, rel=0.01)


def test_every_token_meets_all_of_a_dense_model() -> None:
    shape = load_model("llama3-8b")
    assert active_parameters(shape) == count_parameters(shape)


def test_mtp_is_counted_on_demand() -> None:
    shape = load_model("deepseek-v3")
    more = count_parameters(shape, mtp=True) - count_parameters(shape)
    assert more == pytest.approx(11.6e9, rel=0.01)  # a layer with 257 experts, and a projection of 2 x 7168 x 7168


def test_every_preset_says_its_source() -> None:
    for file in MODELS.glob("*.toml"):
        assert load_model(file.stem).source, file
    for file in CLUSTERS.glob("*.toml"):
        cluster = load_cluster(file.stem)
        assert cluster.source, file
        assert cluster.gpu == file.stem
        assert cluster.num_gpus == cluster.nvlink_domain, "one domain"
    assert len(list(MODELS.glob("*.toml"))) == 10
    assert len(list(CLUSTERS.glob("*.toml"))) == 8


def test_rates_grow_with_each_halving_of_precision() -> None:
    for file in CLUSTERS.glob("*.toml"):
        rates = load_cluster(file.stem).peak_flops
        ordered = [rates[name] for name in ("bf16", "fp8", "nvfp4") if name in rates]
        assert all(2 <= more / less * 1.001 <= 3.1 for less, more in pairwise(ordered)), file
