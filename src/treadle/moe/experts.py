"""A rank's own experts."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from treadle.moe.permutation import permuted, transposition
from treadle.runtime.model.exchange import RankOwned
from treadle.runtime.model.grouped_linear import GroupedLinear
from treadle.runtime.model.grouped_mm import RowGroups


class Experts(RankOwned):
    """Gated MLPs, numbers `first` to `first + num - 1` of all. No other rank of its group has them.

    All experts' weights of a projection are one parameter and one grouped matrix multiplication: `up.weight` is
    [num, 2 * hidden, width], `down.weight` [num, width, hidden]. A state dict has an entry for each expert
    (`up.0.weight`, `up.1.weight`, ...).

    Ranks that begin with one seed, as their other parameters require, get different experts: the initial values depend
    on `first`.
    """

    def __init__(self, width: int, hidden: int, num: int, first: int = 0) -> None:
        super().__init__()
        self.first = first
        self.up = GroupedLinear(num, width, 2 * hidden)
        self.down = GroupedLinear(num, hidden, width)
        self._separate()

    def _separate(self) -> None:
        """Draw the values again where these are also those of the group's first rank."""
        up = self.up.weight
        if self.first == 0 or up.is_meta:
            return
        drawn = up.detach().flatten()[:64].cpu().view(torch.uint8).numpy().tobytes()  # follows the caller's seed
        digest = hashlib.sha256(drawn + str(self.first).encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        for linears in (self.up, self.down):
            linears.reset_parameters(generator)

    def __len__(self) -> int:
        return len(self.up)

    def forward(self, rows: Tensor, arriving: list[list[int]]) -> Tensor:
        """Run the experts on rows sorted by rank and then by expert; `arriving[rank][expert]` rows each."""
        from_each = list(zip(*arriving, strict=True))
        groups = RowGroups([sum(rows_of) for rows_of in from_each])
        if len(arriving) == 1 or len(self) == 1:
            return self._run(rows, groups)
        by_expert, by_rank = (transposition(sizes, rows.device) for sizes in (arriving, from_each))
        return permuted(self._run(permuted(rows, by_expert, by_rank), groups), by_rank, by_expert)

    def _run(self, rows: Tensor, groups: RowGroups) -> Tensor:
        gate, value = self.up(rows, groups).chunk(2, dim=-1)
        out: Tensor = self.down(nn.functional.silu(gate) * value, groups)
        return out
