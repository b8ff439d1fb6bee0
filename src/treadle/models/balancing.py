"""Balances experts without a loss: a bias on each expert's score moves against its load (DeepSeek-V3)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from treadle.dist.groups import Group
from treadle.models.decoder_layers import ExpertLayer
from treadle.moe.router import Router
from treadle.runtime.model.stage_blocks import children_of


@torch.no_grad()
def update_bias(stages: Mapping[int, nn.Module], rate: float, group: Group | None = None) -> None:
    """Move the biases of all sigmoid routers, after a step: up for experts with less than the mean load, else down.

    The load is what `tokens_per_expert` has counted in the forwards of training steps since the last update,
    summed over the group; it begins again from 0. Stages without such routers are left alone.

    Args:
        stages: this rank's modules of `build_stages`.
        rate: how far a bias moves, the config's `bias_update_rate`.
        group: the ranks with the same stages, `pipe.groups.reduce_group`; they call it together. None: no others.

    """
    routers = _routers(stages)
    if not routers:
        return
    loads = torch.stack([router.tokens_per_expert for router in routers])
    if group is not None:
        group.all_reduce(loads)
    for router, load in zip(routers, loads, strict=True):
        router.e_score_correction_bias += rate * (load.mean() - load).sign()
        router.tokens_per_expert.zero_()


def _routers(stages: Mapping[int, nn.Module]) -> list[Router]:
    """Return a rank's sigmoid routers by the number of their layer: chunks come in another order on other ranks."""
    layers = [block for stage in stages.values() for block in children_of(stage) if isinstance(block, ExpertLayer)]
    gates = (layer.mlp.gate for layer in sorted(layers, key=lambda layer: layer.number))
    return [gate for gate in gates if gate.scoring == "sigmoid"]
