"""What `.ci/cuda_build` looks up in torch's CUDA build, and finds lacking where it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.nccl_double import Nccl
from tests.support.torch_names import SOURCE, Used, lacking

LACKS = {
    "import torch\ntorch.no_such_thing(1)": "torch.no_such_thing: ",
    "from torch import nn\nnn.Linear(1, 1, bits=4)": "torch.nn.Linear takes no bits",
    "from torch.distributed.rendezvous import no_store": "torch.distributed.rendezvous.no_store: ",
    "group.alltoall_base(1)": "ProcessGroupNCCL has no alltoall_base",
    "X = 'TORCH_NCCL_NO_SUCH_SETTING'": "no library of torch reads TORCH_NCCL_NO_SUCH_SETTING",
}


@pytest.mark.slow
@pytest.mark.parametrize("text", LACKS)
def test_what_torch_lacks_is_found(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    (tmp_path / "a.py").write_text(text)
    (found,) = lacking(Used.of(tmp_path))
    assert LACKS[text] in found
    assert found.startswith(f"{tmp_path / 'a.py'}:")


def test_an_option_that_nccl_lacks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    (tmp_path / "communicators.py").write_text("options.config.no_such = 1\noptions.config.max_ctas = 2")
    (found,) = lacking(Used.of(tmp_path))
    assert found.endswith("ProcessGroupNCCL.Options has no config.no_such")


def test_the_source_is_read() -> None:
    used = Used.of(SOURCE)
    assert {"_timeout", "config.max_ctas", "config.blocking", "global_ranks_in_group"} <= set(used.fields)
    assert {"abort", "shutdown", "eager_connect_single_device", "alltoall_base"} <= set(used.methods)
    assert {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTORCH_ALLOC_CONF"} <= set(used.settings)
    assert {"torch.distributed.ProcessGroupNCCL.Options", "torch.Stream"} <= set(used.names)
