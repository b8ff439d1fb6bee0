"""Megatron-Bridge's published runs: constants fitted on some, the others predicted.

Four ways to leave runs out, of the releases from 26.02 on whose recipes are known exactly (156 runs; those of GPT-OSS
in 26.06.01 have a known regression and are left out of all):

- a release at a time: what the next release takes;
- a configuration at a time (model, GPUs, precision, batch, cuts), whatever its flags and release;
- from the latter, pairs of one model, GPU and release that are more than 5 % apart: which is the faster;
- all of Kimi K2.

Each time `treadle.estimate.calibration` is fitted to the runs that are left, and knows nothing of the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache
from itertools import combinations

from held_to.rows import Miss, Prediction, misses_of, spread
from held_to.runs import bridge_runs, title
from treadle.estimate.calibration import Calibration, configuration
from treadle.estimate.constants import MeasuredRun

FIRST = "26.02"
APART = 1.05


@cache
def runs() -> tuple[MeasuredRun, ...]:
    """Return the runs that are fitted and predicted."""
    return tuple(run for run in bridge_runs() if run.software >= FIRST and "regression" not in run.flags)


def leave_out(key: Callable[[MeasuredRun], object]) -> list[float]:
    """Return each run's seconds, predicted from the runs that differ from it by `key`."""
    groups: dict[object, list[int]] = {}
    for index, run in enumerate(runs()):
        groups.setdefault(key(run), []).append(index)
    predicted = [0.0] * len(runs())
    for held_out in groups.values():
        apart = set(held_out)
        calibration = Calibration.fit([run for index, run in enumerate(runs()) if index not in apart])
        for index in held_out:
            predicted[index] = calibration.predict(runs()[index])
    return predicted


@cache
def by_release() -> tuple[Prediction, ...]:
    """Return the predictions with a release left out at a time."""
    return _predictions(leave_out(lambda run: run.software))


@cache
def by_configuration() -> tuple[Prediction, ...]:
    """Return the predictions with a configuration left out at a time."""
    return _predictions(leave_out(configuration))


@cache
def kimi_k2() -> tuple[Prediction, ...]:
    """Return the predictions of Kimi K2 from all other models."""
    calibration = Calibration.fit([run for run in runs() if run.job.model.name != "kimi-k2"])
    left = [run for run in runs() if run.job.model.name == "kimi-k2"]
    return tuple(Prediction(title(run), calibration.predict(run), run.seconds) for run in left)


def ranked() -> tuple[int, int]:
    """Return how many pairs of a model, GPU and release are ranked right, and how many pairs there are."""
    right = total = 0
    for one, other in combinations(range(len(runs())), 2):
        if _place(runs()[one]) != _place(runs()[other]):
            continue
        measured = _speed(one, runs()[one].seconds) / _speed(other, runs()[other].seconds)
        if max(measured, 1 / measured) <= APART:
            continue
        predicted = _speed(one, by_configuration()[one].predicted) / _speed(other, by_configuration()[other].predicted)
        total += 1
        right += (predicted > 1) == (measured > 1)
    return right, total


def run() -> dict[str, float]:
    """Return the figures of this data set, in percent."""
    right, total = ranked()
    return {
        "bridge_release_dense_median": _median(by_release(), moe=False),
        "bridge_release_moe_median": _median(by_release(), moe=True),
        "bridge_config_dense_median": _median(by_configuration(), moe=False),
        "bridge_config_moe_median": _median(by_configuration(), moe=True),
        "bridge_rank": 100 * right / total,
        "kimi_k2_max": 100 * spread(kimi_k2())["max"],
    }


def distributions() -> dict[str, dict[str, float]]:
    """Return median, mean, 90th percentile and maximum of the absolute errors, by protocol and kind."""
    found = {}
    for name, predictions in (("release", by_release()), ("configuration", by_configuration())):
        for kind, moe in (("dense", False), ("moe", True)):
            found[f"{name}, {kind}"] = spread(_of_kind(predictions, moe=moe))
    return found | {"kimi_k2": spread(kimi_k2())}


def misses() -> list[Miss]:
    """Return the runs off by more than 15 %, with causes; those of configurations left out, then of releases."""
    return [*misses_of(by_configuration(), _cause), *misses_of(by_release(), _cause), *misses_of(kimi_k2(), _cause)]


_LAUNCHES = "probably bound by launches: many small chunks or micro-batches, no whole graph; "
_CAUSES = (
    ("qwen3-30b-a3b 16 h100 fp8 tp1 cp1 pp2 vpp12", f"{_LAUNCHES}the only run of its kind"),
    ("qwen3-30b-a3b 16 h100", "the nearest run is the one with pp2 vpp12 on the same GPUs, 43 % slower"),
    ("qwen3-30b-a3b 8 b200 mxfp8 tp1 cp1 pp1 vpp1 ep8 mbs1", f"{_LAUNCHES}others on this GPU have mbs4"),
    ("qwen3-30b-a3b", "graphs hold router and preprocessing only; known from few runs"),
    ("qwen3-235b-a22b 256 b300 mxfp8 tp1 cp1 pp8 vpp4", f"{_LAUNCHES}55 % slower than what 26.04.01 runs"),
    ("qwen3-235b-a22b 256 b300", "measured 22 % apart in 26.04 and 26.04.01, with no flag that differs"),
    ("gpt-oss-120b 64 b200 bf16 tp1 cp1 pp1 vpp1 ep64", "ep64 over NICs, no HybridEP: two such runs in all"),
    ("gpt-oss-120b 64 b300 bf16 tp1 cp1 pp1 vpp1 ep64", "ep64 over NICs, no HybridEP: two such runs in all"),
    ("gpt-oss-120b", "not sure: told by its runs with other flags; no other model has its attention (sinks, windows)"),
    ("gb200 nvfp4", "two configurations, each told by the other: NVFP4 gains 1.2-1.3 on MXFP8 at 70B, 1.4-1.5 at 405B"),
    ("llama3-70b 64 gb300 nvfp4", "26.04 is 9 % faster than 26.02; the other NVFP4 runs have tp 2 or 4"),
    ("llama3-70b 64 gb200 fp8 tp1", "FSDP with 40 layers offloaded: told by the one other such run, with 20 layers"),
)


def _cause(prediction: Prediction) -> str:
    for part, cause in _CAUSES:
        if part in prediction.row:
            return cause
    return "not known"


def _predictions(seconds: list[float]) -> tuple[Prediction, ...]:
    return tuple(Prediction(title(run), each, run.seconds) for run, each in zip(runs(), seconds, strict=True))


def _of_kind(predictions: tuple[Prediction, ...], *, moe: bool) -> list[Prediction]:
    return [each for each, run in zip(predictions, runs(), strict=True) if run.job.model.is_moe is moe]


def _median(predictions: tuple[Prediction, ...], *, moe: bool) -> float:
    return 100 * statistics.median(abs(each.error) for each in _of_kind(predictions, moe=moe))


def _place(run: MeasuredRun) -> tuple[str, str, str]:
    return run.job.model.name, run.gpu, run.software


def _speed(index: int, seconds: float) -> float:
    """Tokens a second and GPU."""
    job = runs()[index].job
    return job.global_batch_size * job.seq_len / job.cluster.num_gpus / seconds
