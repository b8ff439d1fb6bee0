"""What ranks claim of their parameters before the first step: copies of one are equal, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from treadle.dist.mesh_position import MeshPosition
from treadle.dist.streams import HOST_MEMORY
from treadle.ir.placement import Placement
from treadle.runtime.agreement import Claim
from treadle.runtime.model.exchange import RankOwned

_PIECE = 1 << 16  # elements of a parameter that are read at once, so that reading takes little memory
_LONG = (1 << 64) - 1
_FACTOR = 0x5851F42D4C957F2D
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def claims_of_copies(modules: Mapping[int, nn.Module], placement: Placement, position: MeshPosition) -> Iterator[Claim]:
    """Yield for each stage of this rank its parameters, where other ranks have copies of it.

    An expert is compared with the same expert of other expert groups, and of the pipe's other end.
    """
    if position.dp == 1 and placement.num_pipes == 1:
        return
    refusal = (
        "copies of a stage start from different parameters: {}; make them from one seed, or broadcast them before "
        "making the Pipeline"
    )
    for chunk, module in modules.items():
        stage = placement.stage(position.pp_rank, chunk)
        named = list(module.named_parameters())
        owned = parameters_of_experts(module) if position.ep > 1 else set()
        forms = zip(named, forms_of([param for _, param in named]), strict=True)
        facts: tuple[dict[str, str], dict[str, str]] = {}, {}
        for (name, param), form in forms:
            facts[param in owned][f"{name} of stage {stage}"] = form
        yield Claim(f"parameters of stage {stage}", facts[0], refusal)
        yield Claim(f"experts {position.dp_rank % position.ep} of stage {stage}", facts[1], refusal)


def parameters_of_experts(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that no other rank of an expert group has."""
    return {param for part in module.modules() if isinstance(part, RankOwned) for param in part.parameters()}


def forms_of(params: Sequence[nn.Parameter]) -> list[str]:
    """Return shape, type and bits of each parameter, and whether it trains. Meta tensors have no bits."""
    real = [param for param in params if not param.is_meta]
    bits = dict(zip(real, digests_of(real), strict=True))
    return [f"{_form_of(param)}, bits {bits[param]}" if param in bits else _form_of(param) for param in params]


def _form_of(param: nn.Parameter) -> str:
    """Returns the shape and type of a parameter, and whether it trains."""
    return f"shape {tuple(param.shape)}, {param.dtype}, requires_grad={param.requires_grad}"


def digests_of(params: Sequence[nn.Parameter]) -> list[str]:
    """Returns a digest of each parameter's bits, in which the place of each element counts.

    It is a sum of elements times random weights, modulo 2**64. In each further piece all weights are multiplied by
    one more random number, so they do not repeat.
    """
    if not params:
        return []
    weights = _weights(_PIECE, params[0].device)
    totals = []
    for param in params:
        flat = param.detach().reshape(-1).contiguous()
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        bits = flat.view(_BITS[min(flat.itemsize, 4)])
        total = torch.zeros((), dtype=torch.int64, device=param.device)
        for first in range(0, bits.numel(), _PIECE):
            piece = bits[first : first + _PIECE].to(torch.int64)
            total = total * _FACTOR + (piece * weights[: len(piece)]).sum()
        totals.append(total)
    return [f"{total & _LONG:016x}" for total in torch.stack(totals).to(HOST_MEMORY).tolist()]


def _weights(num: int, device: torch.device) -> Tensor:
    """Returns odd random numbers, the same on every rank (splitmix64)."""
    mixed = torch.arange(1, num + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ ((mixed >> shift) & (_LONG >> shift))) * _signed(factor)
    return (mixed ^ ((mixed >> 31) & (_LONG >> 31))) | 1


def _signed(number: int) -> int:
    """Returns the number of 64 bits as int64 has it."""
    return number - (1 << 64) if number >> 63 else number
