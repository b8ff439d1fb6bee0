"""A layer that names its segments, so that its all-to-all runs beside computation.

torchrun --nproc-per-node 4 examples/moe_layer.py

It needs: pip install '.[run]'

Two ranks along the pipe, an expert group of two at each. An overlapped cell runs the forward of one micro-batch and the
backward of another, as `treadle show interleaved-overlap --pp 2 -m 8 --lower --rank 0 --layers 1 --moe` prints it.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from treadle.moe import Exchange, Experts, Router, Routing
from treadle.runtime.model.segments import Segment, compute, exchange

WIDTH, HIDDEN, EXPERTS, EP = 32, 64, 4, 2


class Layer(nn.Module):
    """Tokens to their experts and back. What segments hand each other has a name; nothing is kept in the module."""

    def __init__(self, ep_rank: int) -> None:
        super().__init__()
        own = EXPERTS // EP
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router, self.exchange = Router(WIDTH, EXPERTS, top_k=1), Exchange()
        self.experts = Experts(WIDTH, HIDDEN, own, first=ep_rank * own)

    def segments(self) -> list[Segment]:
        return [
            compute("attn", self.route, reads="x", writes="h rows gates routing"),
            exchange("counts", lambda r: self.exchange.counts(r.counts), reads="routing", writes="arriving"),
            exchange("host", self.wait, reads="routing arriving", writes="send table"),
            exchange("dispatch", self.dispatch, reads="rows send table", writes="received"),
            compute("mlp", self.experts, reads="received table", writes="made"),
            exchange("combine", self.combine, reads="made h gates routing send table", writes="x"),
        ]

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Routing]:
        h = x + self.mix(self.norm(x))
        gates, routing, _ = self.router(h)
        return h, h[routing.order], gates, routing

    def wait(self, routing: Routing, arriving: Tensor) -> tuple[list[int], list[list[int]]]:
        return routing.counts.reshape(EP, -1).sum(1).tolist(), arriving.reshape(EP, -1).tolist()

    def dispatch(self, rows: Tensor, send: list[int], table: list[list[int]]) -> Tensor:
        return self.exchange.swap(rows, send, [sum(of_rank) for of_rank in table])

    def combine(
        self, made: Tensor, h: Tensor, gates: Tensor, routing: Routing, send: list[int], table: list[list[int]]
    ) -> Tensor:
        back = self.exchange.swap(made, [sum(of_rank) for of_rank in table], send)
        return h.index_add(0, routing.order, back * gates[routing.order])


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 1, EP), mesh_dim_names=("pp", "dp", "ep"))
schedule = treadle.generate("interleaved-overlap", pp=2, microbatches=8)
stages = {}
for chunk in range(schedule.vpp):
    torch.manual_seed(schedule.placement.stage(mesh.get_local_rank("pp"), chunk))
    stages[chunk] = nn.Sequential(Layer(mesh.get_local_rank("ep")))
pipe = treadle.Pipeline(stages, schedule, mesh=mesh, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW([p for stage in stages.values() for p in stage.parameters()], lr=3e-3)
torch.manual_seed(mesh.get_local_rank("ep"))
for step in range(10):
    x = torch.randn(8 * 16, WIDTH)
    optimizer.zero_grad()
    loss = pipe.step(x, x.roll(1, dims=-1))
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}  loss {loss:.4f}")  # noqa: T201
pipe.close()
dist.destroy_process_group()
