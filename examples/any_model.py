"""Any model, in a pipeline: torchrun --nproc-per-node 4 examples/any_model.py

It needs: pip install '.[run]'

Four ranks with two chunks each train a small residual network by zb-v, and print the loss as it falls.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import treadle


class Block(nn.Module):
    """A layer; any nn.Module will do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


dist.init_process_group("gloo")
rank, pp, width = dist.get_rank(), dist.get_world_size(), 64
mesh = init_device_mesh("cpu", (pp,), mesh_dim_names=("pp",))
schedule = treadle.generate("zb-v", pp=pp, microbatches=2 * pp)

torch.manual_seed(0)  # the same model on every rank, of which each keeps its own stages
model = [nn.Sequential(Block(width), Block(width)) for _ in range(schedule.placement.num_stages)]
stages = {chunk: model[schedule.placement.stage(rank, chunk)] for chunk in range(schedule.vpp)}
pipe = treadle.Pipeline(stages, schedule, mesh=mesh, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW([p for stage in stages.values() for p in stage.parameters()], lr=1e-3)

for step in range(10):
    x = torch.randn(32 * pp, width)  # seeded alike, so every rank has the whole batch; it uses what it needs
    optimizer.zero_grad()
    loss = pipe.step(x, x.roll(1, dims=-1))
    optimizer.step()
    if rank == 0:
        print(f"step {step}  loss {loss:.4f}")  # noqa: T201
treadle.save_trace(pipe.gather_trace(), "trace.json.gz") if rank == 0 else pipe.gather_trace()
pipe.close()
dist.destroy_process_group()
