"""A rank's own experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from treadle.runtime.model.exchange import RankOwned
from treadle.runtime.model.grouped_linear import GroupedLinear
from treadle.runtime.model.grouped_mm import RowGroups


class Experts(RankOwned):
    """Gated MLPs, numbers `first` to `first + num - 1` of all. No other rank of its group has them.

    All experts' weights of a projection are one parameter and one grouped matrix multiplication: `up.weight` is
    [num, 2 * hidden, width], `down.weight` [num, width, hidden]. A state dict has an entry for each expert
    (`up.0.weight`, `up.1.weight`, ...).
    """

    def __init__(self, width: int, hidden: int, num: int, first: int = 0) -> None:
        super().__init__()
        self.first = first
        self.up = GroupedLinear(num, width, 2 * hidden)
        self.down = GroupedLinear(num, hidden, width)

    def __len__(self) -> int:
        return len(self.up)

    def forward(self, rows: Tensor, arriving: list[list[int]]) -> Tensor:
        """Run the experts on rows sorted by rank and then by expert; `arriving[rank][expert]` rows each."""
        for_expert = list(zip(*arriving, strict=True))
        groups = RowGroups([sum(from_ranks) for from_ranks in for_expert])
        gate, value = self.up(_transposed(rows, arriving), groups).chunk(2, dim=-1)
        out: Tensor = self.down(nn.functional.silu(gate) * value, groups)
        return _transposed(out, for_expert)


def _transposed(rows: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Return rows that are sorted by (i, j), `sizes[i][j]` each, sorted by (j, i). One copy, and no index to make."""
    num = len(sizes[0])
    if len(sizes) == 1 or num == 1:
        return rows
    pieces = torch.split(rows, [size for of_one in sizes for size in of_one])
    return torch.cat([piece for j in range(num) for piece in pieces[j::num]])
