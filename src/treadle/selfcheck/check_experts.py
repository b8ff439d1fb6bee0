"""Checks grouped experts against one linear after the other, in the types that the device multiplies."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from treadle.moe import Experts
from treadle.selfcheck.check_report import FailedError, Passed
from treadle.selfcheck.ranks import run_ranks
from treadle.selfcheck.setup import Setup

WIDTH, HIDDEN, ARRIVING = 64, 96, [[5, 0, 40, 3], [0, 0, 17, 8]]
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Loose in float32: a GPU may multiply in TF32."""


def check_experts(setup: Setup) -> Passed:
    """Compare the output, the input gradient and the weight gradients; one expert gets no rows."""
    (told,) = run_ranks(setup, 1, experts_in_rank)
    return told  # type: ignore[no-any-return]


def experts_in_rank(setup: Setup, rank: int) -> Passed:
    """Run the check in a process of its own."""
    worst: dict[str, float] = {}
    for dtype, tolerance in TOLERANCE.items():
        name = str(dtype).removeprefix("torch.")
        torch.manual_seed(3)
        experts = Experts(WIDTH, HIDDEN, len(ARRIVING[0])).to(setup.device(0), dtype)
        rows = torch.randn(sum(map(sum, ARRIVING)), WIDTH).to(setup.device(0), dtype)
        for what, off in _distances(experts, rows).items():
            worst[name] = max(worst.get(name, 0.0), off)
            if not off <= tolerance:
                raise FailedError(
                    f"{what} of experts in {name} is off by {off:.1e} of its largest entry, allowed {tolerance}",
                    "torch's grouped_mm is wrong on this device; report it with this file",
                )
    return Passed(", ".join(f"{name} off by {off:.0e}" for name, off in worst.items()) + " from a loop", worst)


def _distances(experts: Experts, rows: Tensor) -> dict[str, float]:
    params = [experts.up.weight, experts.down.weight]
    mine, theirs = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    made, wanted = experts(mine, ARRIVING), _loop(experts, theirs)
    grads = torch.autograd.grad(made.sum(), [mine, *params])
    want = torch.autograd.grad(wanted.sum(), [theirs, *params])
    pairs = zip((made, *grads), (wanted, *want), strict=True)
    names = ("output", "input gradient", "up gradient", "down gradient")
    return dict(zip(names, (far(a, b) for a, b in pairs), strict=True))


def far(got: Tensor, want: Tensor) -> float:
    """Return the largest difference, over the largest entry."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-12))


def _loop(experts: Experts, rows: Tensor) -> Tensor:
    num = len(experts)
    pieces = list(torch.split(rows, [size for of_rank in ARRIVING for size in of_rank]))
    for at, piece in enumerate(pieces):
        gate, value = functional.linear(piece, experts.up.weight[at % num]).chunk(2, dim=-1)
        pieces[at] = functional.linear(functional.silu(gate) * value, experts.down.weight[at % num])
    return torch.cat(pieces)
