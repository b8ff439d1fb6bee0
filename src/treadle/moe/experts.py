"""A rank's own experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from treadle.runtime.model.exchange import RankOwned


class Experts(RankOwned):
    """Gated MLPs, numbers `first` to `first + num - 1` of all. No other rank of its group has them."""

    def __init__(self, width: int, hidden: int, num: int, first: int = 0) -> None:
        super().__init__()
        self.first = first
        self.up = nn.ModuleList(nn.Linear(width, 2 * hidden, bias=False) for _ in range(num))
        self.down = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(num))

    def __len__(self) -> int:
        return len(self.up)

    def forward(self, rows: Tensor, arriving: list[list[int]]) -> Tensor:
        """Runs the experts on rows sorted by rank and then by expert; `arriving[rank][expert]` rows each."""
        sizes = [size for of_rank in arriving for size in of_rank]
        pieces = list(torch.split(rows, sizes))
        num = len(self)
        made: list[Tensor] = [rows] * len(pieces)
        for expert in range(num):
            mine = pieces[expert::num]
            gate, value = self.up[expert](torch.cat(mine)).chunk(2, dim=-1)
            out = self.down[expert](nn.functional.silu(gate) * value)
            made[expert::num] = torch.split(out, [len(piece) for piece in mine])
        return torch.cat(made)
