"""What one grouped multiplication a projection saves: `python benchmarks/experts.py [rounds]`.

The experts of one rank, forward and backward, on one CPU thread. Two contenders take turns on the same rows:

    grouped   `treadle.moe.Experts`
    loop      a linear for each expert and projection, one after the other, on rows gathered for each

Rows are spread unevenly, and one expert gets none. The last line is JSON: for each size the median over rounds of
grouped / loop, its quartiles, and both medians in milliseconds. It says nothing of a GPU, where a loop leaves most of
the device idle.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from treadle.moe import Experts

RANKS, ROUNDS, WARM_UP = 4, 41, 5


class Size(NamedTuple):
    """One rank's experts, and how many rows they get on average."""

    num: int
    rows_each: int
    width: int
    hidden: int


SIZES = {"8 of 64 rows": Size(8, 64, 128, 256), "64 of 8 rows": Size(64, 8, 64, 64)}

Run = Callable[[Tensor, list[list[int]]], Tensor]


class Loop(nn.Module):
    """One linear after the other."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(size.width, 2 * size.hidden, bias=False) for _ in range(size.num))
        self.down = nn.ModuleList(nn.Linear(size.hidden, size.width, bias=False) for _ in range(size.num))

    def forward(self, rows: Tensor, arriving: list[list[int]]) -> Tensor:
        """Runs each expert on its rows from all ranks."""
        pieces = list(torch.split(rows, [size for of_rank in arriving for size in of_rank]))
        num, made = len(self.up), list(pieces)
        for expert in range(num):
            mine = pieces[expert::num]
            gate, value = self.up[expert](torch.cat(mine)).chunk(2, dim=-1)
            out = self.down[expert](nn.functional.silu(gate) * value)
            made[expert::num] = torch.split(out, [len(piece) for piece in mine])
        return torch.cat(made)


def spread(size: Size) -> list[list[int]]:
    """Rows from each rank for each expert: none for the first, up to twice the mean for the others."""
    draw = torch.Generator().manual_seed(1)
    each = torch.randint(0, 2 * size.rows_each // RANKS + 1, (RANKS, size.num), generator=draw)
    each[:, 0] = 0
    arriving: list[list[int]] = each.tolist()
    return arriving


def timed(run: Run, params: list[nn.Parameter], rows: Tensor, arriving: list[list[int]]) -> float:
    """Milliseconds of a forward and a backward."""
    for param in params:
        param.grad = None
    begin = time.perf_counter()
    torch.autograd.backward(run(rows, arriving).sum())
    return (time.perf_counter() - begin) * 1e3


def measure(size: Size, rounds: int) -> dict[str, float]:
    """Both contenders in turns."""
    torch.manual_seed(0)
    arriving = spread(size)
    rows = torch.randn(sum(map(sum, arriving)), size.width, requires_grad=True)
    contenders: dict[str, nn.Module] = {
        "grouped": Experts(size.width, size.hidden, size.num),
        "loop": Loop(size),
    }
    took: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(WARM_UP + rounds):
        for name, module in contenders.items():
            dur_ms = timed(module, list(module.parameters()), rows, arriving)
            if turn >= WARM_UP:
                took[name].append(dur_ms)
    ratios = [a / b for a, b in zip(took["grouped"], took["loop"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    medians = {f"{name}_ms": round(statistics.median(times), 3) for name, times in took.items()}
    return {"ratio": round(middle, 3), "low": round(low, 3), "high": round(high, 3), **medians}


def main() -> None:
    """All sizes."""
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    told = {name: measure(size, rounds) for name, size in SIZES.items()}
    for name, result in told.items():
        print(f"{name}: grouped {result['grouped_ms']} ms, loop {result['loop_ms']} ms, ratio {result['ratio']}")
    print(json.dumps({"torch": torch.__version__, "rounds": rounds, **told}))


if __name__ == "__main__":
    main()
