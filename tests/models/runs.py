"""Steps of models on ranks: what a rank does with one parallel layout, and how far its gradients are from others'."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from tests.support.devices import DEVICE_TYPE, device_of
from treadle.ir.blocks import LAYERS
from treadle.models import (
    IGNORED,
    Documents,
    ModelConfig,
    build_stages,
    load_pretrained,
    loss_fn,
    tied_parameters,
    views_of_stages,
)


@dataclass(frozen=True)
class Layout:
    """A schedule on pp x dp x ep ranks."""

    schedule: str
    pp: int
    dp: int = 1
    ep: int = 1
    microbatches: int = 4
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.schedule} pp{self.pp} dp{self.dp} ep{self.ep} {self.options or ''}".strip()


@dataclass(frozen=True)
class Batch:
    """A global batch; all its tensors are [samples, tokens]."""

    inputs: Tensor
    targets: Tensor
    documents: Tensor
    positions: Tensor

    @property
    def num_tokens(self) -> int:
        """The targets that count."""
        return int((self.targets != IGNORED).sum())

    def part(self, at: int, num: int) -> Batch:
        """The samples of one of `num` replicas."""
        return Batch(*(t.chunk(num)[at] for t in (self.inputs, self.targets, self.documents, self.positions)))

    @property
    def side(self) -> dict[str, Any]:
        """What `Pipeline.step` takes beside."""
        return {"positions": self.positions, "documents": Documents.of(self.documents.cpu())}


def rows_of(config: ModelConfig, num_stages: int) -> tuple[str, ...]:
    """The model in stages with as many layers each as can be; all that is not a layer stays with its neighbour."""
    blocks = config.blocks
    first, last = 1, 1 + config.num_hidden_layers
    cuts = [first + at * config.num_hidden_layers // num_stages for at in range(num_stages)]
    cuts[0] = 0
    rows = tuple(blocks[a:b] for a, b in zip(cuts, [*cuts[1:], len(blocks)], strict=True))
    assert blocks[last - 1] in LAYERS
    return rows


def gradients_of(stages: dict[int, nn.Sequential]) -> dict[str, Tensor]:
    """This rank's gradients under the names of checkpoints."""
    found = {}
    for view in views_of_stages(stages):
        if isinstance(view.tensor, nn.Parameter):
            assert view.tensor.grad is not None, view.name
            found[view.name] = view.of(view.tensor.grad).cpu()
    return found


def run_step(rank: int, layout: Layout, config: ModelConfig, directory: Path, batch: Batch) -> dict[str, Any]:
    """One step of a model from a checkpoint; this rank's gradients, the loss, and what the report says."""
    mesh = init_device_mesh(DEVICE_TYPE, (layout.pp, layout.dp, layout.ep), mesh_dim_names=("pp", "dp", "ep"))
    schedule = treadle.generate(layout.schedule, pp=layout.pp, microbatches=layout.microbatches)
    rows = rows_of(config, schedule.placement.num_stages)
    at = dict(enumerate(schedule.placement.stages[mesh.get_local_rank("pp")]))
    stages = build_stages(
        config, rows, at, ep=layout.ep, ep_rank=mesh.get_local_rank("ep"), seed=1, device=device_of(rank)
    )
    load_pretrained(stages, directory)
    mine = batch.part(mesh.get_local_rank("dp") * layout.ep + mesh.get_local_rank("ep"), layout.dp * layout.ep)
    pipe = treadle.Pipeline(
        stages, schedule, mesh=mesh, loss_fn=loss_fn, tied=tied_parameters(config, rows), **layout.options
    )
    loss = pipe.step(
        mine.inputs,
        mine.targets,
        side={**mine.side, "documents": mine.side["documents"].split(schedule.num_microbatches)},
        num_tokens=batch.num_tokens,
    )
    norm = float(pipe.grad_norm())
    assert pipe.report is not None
    told = {name: float(value) for name, value in pipe.report.by_name.items()}
    pipe.close()
    return {"loss": float(loss), "norm": norm, "by_name": told, "gradients": gradients_of(stages), "stages": stages}


def run_layouts(
    rank: int, layouts: list[Layout], config: ModelConfig, directory: Path, batch: Batch, wanted: Path
) -> dict[str, tuple[float, float, float, str]]:
    """For each layout the loss, the norm, the largest relative difference of a gradient from a file's, and its name."""
    expected = torch.load(wanted, map_location="cpu")
    found = {}
    for layout in layouts:
        made = run_step(rank, layout, config, directory, batch)
        found[str(layout)] = (made["loss"], made["norm"], *furthest(made["gradients"], expected))
    return found


def furthest(got: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference, and where."""
    assert got
    return max(
        (float((grad - expected[name]).abs().max()) / max(float(expected[name].abs().max()), 1e-30), name)
        for name, grad in got.items()
    )
