"""A schedule of your own, from a text file: torchrun --nproc-per-node 2 examples/custom_schedule.py

It needs: pip install '.[run]'

`treadle verify examples/my_schedule.txt` checks it and `treadle draw` shows it; this runs it, and compares the
gradients with those of the same model in one process.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import treadle

dist.init_process_group("gloo")
rank = dist.get_rank()
schedule = treadle.loads(Path(__file__).with_name("my_schedule.txt").read_text())
if dist.get_world_size() != schedule.pp:
    raise SystemExit(f"the schedule is for {schedule.pp} ranks: torchrun --nproc-per-node {schedule.pp} {__file__}")
mesh = init_device_mesh("cpu", (schedule.pp,), mesh_dim_names=("pp",))

torch.manual_seed(0)
model = nn.Sequential(nn.Sequential(nn.Linear(16, 32), nn.Tanh()), nn.Sequential(nn.Linear(32, 16), nn.Tanh())).double()
x, target = torch.randn(8, 16).double(), torch.randn(8, 16).double()

loss_fn = nn.functional.mse_loss
whole = loss_fn(model(x), target)
expected = torch.autograd.grad(whole, list(model[rank].parameters()))

pipe = treadle.Pipeline({0: model[rank]}, schedule, mesh=mesh, loss_fn=loss_fn)
loss = pipe.step(x, target)
apart = max(float((p.grad - g).abs().max()) for p, g in zip(model[rank].parameters(), expected, strict=True))
print(f"rank {rank}: loss {loss:.6f}, in one process {whole:.6f}, gradients differ by at most {apart:.1e}")  # noqa: T201
assert apart < 1e-12
pipe.close()
dist.destroy_process_group()
