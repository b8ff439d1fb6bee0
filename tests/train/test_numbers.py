"""Every number of a configuration is finite and in its range before a run begins."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from treadle.train.checking import check_config
from treadle.train.optim import OptimizerConfig
from treadle.train.run_config import TrainConfig


def numbers(group: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of all fields of a configuration that are numbers."""
    found = []
    for field in fields(group):
        value = getattr(group, field.name)
        if is_dataclass(value):
            found += numbers(value, (*path, field.name))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found.append((*path, field.name))
    return found


NUMBERS = numbers(TrainConfig())


def with_number(path: tuple[str, ...], number: float) -> TrainConfig:
    config = deepcopy(TrainConfig())
    group: Any = config
    for name in path[:-1]:
        group = getattr(group, name)
    object.__setattr__(group, path[-1], number)
    return config


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -1], ids=str)
@pytest.mark.parametrize("path", NUMBERS, ids=".".join)
def test_a_number_out_of_range_is_refused_by_its_name(path: tuple[str, ...], number: float) -> None:
    if path == ("training", "clip_norm") and number == math.inf:
        check_config(with_number(path, number))
        return
    with pytest.raises(ValueError, match=path[-1]):
        check_config(with_number(path, number))


@pytest.mark.parametrize("path", NUMBERS, ids=".".join)
def test_a_huge_number_is_refused_by_its_name(path: tuple[str, ...]) -> None:
    """A deadline of 1e12 s was an OverflowError of threads, behind the start of all ranks."""
    whole = isinstance(getattr(_of(TrainConfig(), path), path[-1]), int)
    for number in (10**300, 2**60) if whole else (1e300, 1e17):
        with pytest.raises(ValueError, match=path[-1]):
            check_config(with_number(path, number))


@pytest.mark.parametrize(("path", "number"), [("parallel.deadline_s", 1e12), ("optimizer.bucket_mb", 1e9)])
def test_a_wait_and_a_bucket_are_of_this_world(path: str, number: float) -> None:
    with pytest.raises(ValueError, match=f"{path} is at most 1,000,000"):
        check_config(with_number(tuple(path.split(".")), number))


def _of(config: Any, path: tuple[str, ...]) -> Any:
    for name in path[:-1]:
        config = getattr(config, name)
    return config


def test_there_are_numbers() -> None:
    assert len(NUMBERS) > 30
    check_config(TrainConfig())


@pytest.mark.parametrize("change", [{"ns_steps": 0}, {"ns_steps": -3}, {"momentum": 1.5}, {"bucket_mb": math.inf}])
def test_an_optimizer_that_cannot_work_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        OptimizerConfig(**change)
