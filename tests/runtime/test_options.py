"""The options of a Pipeline: as one value, by keyword, or both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_type_hints

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the fake backend

import treadle
from tests.support.devices import DEVICE_TYPE
from treadle.runtime.pipeline_options import RunOptions, RunOptionsChanges


@pytest.fixture
def fake_world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=1, store=HashStore())
    yield
    dist.destroy_process_group()


def mean(output: Tensor, target: Any) -> Tensor:
    return output.mean()


def make(**given: Any) -> treadle.Pipeline:
    mesh = init_device_mesh(DEVICE_TYPE, (1,), mesh_dim_names=("pp",))
    with torch.device("meta"):
        stages = {0: nn.Linear(2, 2)}
    return treadle.Pipeline(stages, treadle.generate("1f1b", pp=1, microbatches=2), mesh=mesh, loss_fn=mean, **given)


def test_keywords_have_the_names_and_types_of_the_fields() -> None:
    assert get_type_hints(RunOptionsChanges) == get_type_hints(RunOptions)
    assert set(get_type_hints(RunOptions)) == {field.name for field in fields(RunOptions)}


@pytest.mark.usefixtures("fake_world")
def test_keywords_replace_fields_of_the_options() -> None:
    assert make().options == RunOptions()
    assert make(seed=3, deadline_s=5.0).options == RunOptions(seed=3, deadline_s=5.0)
    assert make(options=RunOptions(seed=3, deadline_s=5.0), seed=None).options == RunOptions(seed=None, deadline_s=5.0)


@pytest.mark.usefixtures("fake_world")
def test_an_unknown_keyword_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'lane'"):
        make(lane="serial")
