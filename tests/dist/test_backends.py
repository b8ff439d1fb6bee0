"""Which backend serves a device, in worlds of several kinds; a device without one is refused with the way out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import treadle
from treadle.dist.backends import backend_of, default_backend, is_dry
from treadle.dist.communicators import make_communicator

CPU, CUDA, META, MPS = map(torch.device, ("cpu", "cuda", "meta", "mps"))


@contextmanager
def world(backend: str) -> Iterator[None]:
    store = FakeStore() if backend == "fake" else HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_the_cpu_is_served_by_gloo_in_any_world(backend: str) -> None:
    with world(backend):
        assert [backend_of(CPU), backend_of(META), is_dry()] == ["gloo", "gloo", False]


def test_a_dry_world_is_fake_for_all_devices() -> None:
    with world("fake"):
        assert is_dry()
        assert {backend_of(device) for device in (CPU, CUDA, META)} == {"fake"}
        assert default_backend(CUDA) == "fake"


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_a_device_without_a_backend_is_refused_with_the_way_out(backend: str) -> None:
    way_out = r'with \'cpu:gloo.*has no backend that sends them; .*init_process_group\("cpu:gloo,cuda:nccl"\)'
    with world(backend), pytest.raises(ValueError, match=way_out):
        backend_of(CUDA)


def test_a_device_that_no_backend_of_torch_serves_is_refused() -> None:
    with world("gloo"), pytest.raises(ValueError, match="knows no backend that sends tensors on mps; move the modules"):
        default_backend(MPS)
    with world("gloo"):
        assert default_backend(CUDA) == "nccl"


@pytest.mark.parametrize(
    ("config", "backend"),
    [("cuda:nccl", "nccl"), ("cpu:gloo,cuda:nccl", "nccl"), ("cpu:gloo,xpu:xccl", "xccl"), ("cpu:ucc,cuda:ucc", "ucc")],
)
def test_a_device_is_served_as_the_world_says(config: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with world("gloo"):
        monkeypatch.setattr(dist, "get_backend_config", lambda: config)
        device = XPU if "xpu" in config else CUDA
        assert backend_of(device) == backend
        assert backend_of(CPU) == "gloo"


XPU = torch.device("xpu")


def test_a_backend_that_is_not_registered_with_torch_is_refused() -> None:
    with world("gloo"), pytest.raises(ValueError, match="'ucc' is none that a Pipeline can make groups of; gloo, nccl"):
        make_communicator("one", [0], 0, dist.constants.default_pg_timeout, CUDA, backend="ucc")


def test_a_pipeline_runs_in_a_world_that_names_backends_by_device() -> None:
    with world("cpu:gloo"):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        schedule = treadle.generate("1f1b", pp=1, microbatches=2)
        pipe = treadle.Pipeline({0: nn.Linear(4, 4)}, schedule, mesh=mesh, loss_fn=nn.functional.mse_loss)
        assert pipe.step(torch.randn(4, 4), torch.randn(4, 4)).isfinite()
        pipe.close()
