"""Makes a rank's stages of a model, and nothing of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from treadle.ir.blocks import LAYERS, check_blocks
from treadle.models.decoder_layers import DenseLayer, ExpertLayer
from treadle.models.ends import LMHead, TokenEmbedding
from treadle.models.initial import draw_initial_values
from treadle.models.model_config import ModelConfig
from treadle.models.mtp import TokenPredictor
from treadle.models.tensor_names import share_parameters
from treadle.moe.exchanges import ExchangeName, MakeExchange


def build_stages(
    config: ModelConfig,
    rows: Sequence[str],
    stages: Mapping[int, int],
    *,
    ep: int = 1,
    ep_rank: int = 0,
    exchange: ExchangeName | MakeExchange = "all_to_all",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[int, nn.Sequential]:
    """Make a rank's stages with initial values, which are the same however the model is cut.

    Args:
        config: the model's shape.
        rows: the block letters of each stage; one after the other they are `config.blocks`.
        stages: for each of this rank's chunks the number of its stage.
        ep: the number of ranks that share the experts.
        ep_rank: which of them this is.
        exchange: how tokens travel to their experts and back, all_to_all or deepep (`treadle.moe.EXCHANGES`), or what
            makes the exchange of a layer.
        device: where the parameters are; on `meta` they have no values.
        dtype: that of the parameters. The bias of a sigmoid router stays float32.
        seed: the same seed makes the same model.

    Returns:
        For each chunk its module: the `stages` of a Pipeline. Copies of a shared parameter are one object.

    Raises:
        ValueError: rows that are not the model, a stage that is not there, experts that do not divide, or an exchange
            that is not installed.

    Example:
        >>> config = ModelConfig(num_hidden_layers=2)
        >>> stages = build_stages(config, ("Et", "tL"), {0: 1})
        >>> [type(block).__name__ for block in stages[0]]
        ['ExpertLayer', 'LMHead']

    """
    _check(config, rows, stages, ep, ep_rank)
    make: dict[str, Callable[[int], nn.Module]] = {
        "E": lambda _: TokenEmbedding(config),
        "d": partial(DenseLayer, config),
        "t": partial(ExpertLayer, config, ep=ep, ep_rank=ep_rank, exchange=exchange),
        "m": partial(TokenPredictor, config),
        "L": lambda _: LMHead(config),
    }
    with torch.device("meta"):
        made = {chunk: _stage(rows, stage, make) for chunk, stage in stages.items()}
    for module in made.values():
        _materialise(module, torch.device(device), dtype)
    share_parameters(list(made.values()), config)  # before values are drawn: of several copies one has a name
    for module in made.values():
        if torch.device(device).type != "meta":
            draw_initial_values(module, seed, config.initializer_range)
    return made


def _check(config: ModelConfig, rows: Sequence[str], stages: Mapping[int, int], ep: int, ep_rank: int) -> None:
    check_blocks(rows)
    if "".join(rows) != config.blocks:
        raise ValueError(f"the stages {'|'.join(rows)} are not this model; its blocks in order are {config.blocks}")
    if len({stage for stage, row in enumerate(rows) if "m" in row}) > 1:
        raise ValueError(f"all MTP blocks stand on one stage, got {'|'.join(rows)}; move every m to one of them")
    for chunk, stage in stages.items():
        if not 0 <= stage < len(rows):
            raise ValueError(f"chunk {chunk} is to be stage {stage}; stages are 0 to {len(rows) - 1}")
    if not 0 <= ep_rank < ep:
        raise ValueError(f"ep_rank is 0 to {ep - 1}, got {ep_rank}")
    if config.num_experts % ep:
        raise ValueError(f"{config.num_experts} experts do not divide over {ep} ranks; ep is a divisor of num_experts")


def _stage(rows: Sequence[str], stage: int, make: Mapping[str, Callable[[int], nn.Module]]) -> nn.Sequential:
    """Make the blocks of a stage; layers are numbered from 0, MTP blocks from 1."""
    layer = sum(row.count(letter) for row in rows[:stage] for letter in LAYERS)
    depth = 1 + sum(row.count("m") for row in rows[:stage])
    blocks: list[nn.Module] = []
    for letter in rows[stage]:
        blocks.append(make[letter](depth if letter == "m" else layer))
        layer, depth = layer + (letter in LAYERS), depth + (letter == "m")
    return nn.Sequential(*blocks)


def _materialise(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give parameters and buffers memory. A router's counts and bias stay float32: a small step would be lost.

    `Module.to_empty` would import torch's compiler, which takes seconds.
    """
    for part in module.modules():
        for name, param in part.named_parameters(recurse=False):
            part.register_parameter(name, nn.Parameter(torch.empty(param.shape, dtype=dtype, device=device)))
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
