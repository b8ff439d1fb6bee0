"""An error of a user's own loop, in real interpreters: the others name it, and the rank prints it itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.support.patience import PATIENT_S

LOOP = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import treadle

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
schedule = treadle.generate("1f1b", pp=2, microbatches=2)
pipe = treadle.Pipeline({0: nn.Linear(4, 4)}, schedule, mesh=mesh, loss_fn=nn.functional.mse_loss)
x = torch.randn(4, 4)
pipe.step(x, x)
if dist.get_rank() == 0:
    END
pipe.step(x, x)
"""
ENDS = {
    "{}['no such key']": (1, "rank 0 was lost first: raised KeyError between steps, after step 0: 'no such key'"),
    "sys.exit(3)": (3, "rank 0 was lost first: it ended or closed its Pipeline between steps, after step 0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_all_ranks_name_what_ended_a_loop(end: str, tmp_path: Path) -> None:
    code, words = ENDS[end]
    script = tmp_path / "loop.py"
    script.write_text(LOOP.replace("END", end))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **where, "RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=PATIENT_S)[1] for rank in ranks]
    assert ranks[0].returncode == code, said[0]
    assert ("KeyError" in said[0]) == (code == 1), said[0]
    assert words in said[1], said[1]
