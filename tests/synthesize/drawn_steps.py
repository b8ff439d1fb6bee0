"""Tiny steps drawn at random, with costs that real machines have and costs that they have not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from tests.synthesize.every_order import Room, TinyCell, TinyStep
from treadle.costs import Costs, parse
from treadle.ir import Kind, Placement
from treadle.lowering import LoweringOptions
from treadle.synthesize import MemoryLimits

PLACEMENTS: dict[str, Callable[[], Placement]] = {
    "one rank": lambda: Placement.loop(1),
    "two ranks": lambda: Placement.loop(2),
    "three ranks": lambda: Placement.loop(3),
    "v": lambda: Placement.v(2),
    "wrapped": lambda: Placement.loop(2, 2),
    "two pipes": lambda: Placement.bidirectional(2),
    "a table": lambda: Placement.table(((1, 2), (0, 3))),
    "two chunks on one rank": lambda: Placement.v(1),
}


@dataclass(frozen=True)
class DrawnStep:
    """A step, as the oracle and as `synthesize_schedule` take it."""

    tiny: TinyStep
    microbatches: int
    costs: Costs
    options: LoweringOptions
    limits: MemoryLimits
    slack: int
    """Ticks by which pairs of micro-batches that differ are rounded in another way."""
    may_prove: bool
    """No pair is faster than its halves, so the solver's bound counts."""
    text: str


def draw_step(seed: str, placement: Placement, microbatches: int) -> DrawnStep:
    """Draw costs, limits and whether backwards stay whole; the same for a seed every time."""
    return _Draw(random.Random(seed), placement, microbatches).step()


class _Draw:
    def __init__(self, draw: random.Random, placement: Placement, microbatches: int) -> None:
        self.draw, self.placement, self.microbatches = draw, placement, microbatches
        per_pipe = microbatches // placement.num_pipes
        self.cells = tuple(
            TinyCell(rank, chunk, mb, placement.pipes[chunk], stage)
            for rank, row in enumerate(placement.stages)
            for chunk, stage in enumerate(row)
            for mb in range(per_pipe)
        )
        self.whole = draw.random() < 0.2
        self.in_bytes = draw.random() < 0.4
        self.base = self._base()
        self.send = draw.choice((0, 0, 1, 2, 3, 9, 50))
        self.factor = [draw.choice(draw.choice(((1,), (1, 2), (1, 1.5, 3)))) for _ in range(placement.num_stages)]
        self.of_mb = [draw.choice((1, 2, 3)) for _ in range(microbatches)] if draw.random() < 0.3 else []
        self.saved = 2 * draw.randint(1, 4)
        self.saved_factor = [draw.choice((1, 1, 2)) for _ in range(placement.num_stages)]

    def _base(self) -> dict[str, int]:
        """Whole backwards: the sum of their halves, less, less than the input half, more; pairs likewise.

        Bytes are counted by time, so that what takes and frees them in no time holds none: no such forward is drawn.
        """
        draw, least = self.draw, int(self.in_bytes)
        f, i, w = draw.randint(least, 6), draw.randint(0, 8), draw.choice((0, draw.randint(1, 6)))
        b = draw.choice((None, None, max(0, i + w - 1), max(0, i - 1), draw.randint(0, i + w), i + w + 1))
        base = {"f": f, "i": i, "w": w} | ({"b": b} if b is not None else {})
        both = base.get("b", i + w)
        if draw.random() < 0.4:
            both += f
            base["fb"] = max(least, draw.choice((draw.randint(0, both), max(f, both - f), max(0, both - 1), both + 1)))
        return base

    def step(self) -> DrawnStep:
        rooms, limits = self._rooms()
        text = self._text()
        ticks = {(kind, cell): self._ticks(kind, cell) for cell in self.cells for kind in Kind}
        pairs = {
            (one, other): pair
            for one in self.cells
            for other in self.cells
            if one.rank == other.rank
            and (pair := self._pair(one, other)) + _ROUNDED < ticks[Kind.F, one] + ticks[Kind.B, other]
        }
        send = {cell: self.send * self._of_mb(cell) * TICKS for cell in self.cells}
        tiny = TinyStep(self.placement, self.cells, ticks, pairs, send, rooms, self.whole)
        layers = self.placement.num_stages if self.in_bytes else None
        options = LoweringOptions(model_layers=layers)
        said = f"{self.placement.name} {self.microbatches} whole={self.whole} {limits}\n{text}"
        slack = _ROUNDED if self.of_mb and pairs else 0
        return DrawnStep(tiny, self.microbatches, parse(text), options, limits, slack, not pairs, said)

    def _text(self) -> str:
        lines = ['name = "drawn"', 'unit = "unit"', "[cells]", *(f"{key} = {n}" for key, n in self.base.items())]
        lines += ["layers = 1"] if self.in_bytes else []
        lines += ["[message]", f"send = {self.send}"]
        for stage, factor in enumerate(self.factor):
            lines += [f"[stage.{stage}]", f"factor = {factor}", f"saved_factor = {self.saved_factor[stage]}"]
        lines += ["[microbatch]", f"factors = {self.of_mb}"] if self.of_mb else []
        lines += ["[saved_bytes]", f"attn = {self.saved - 1}", "mlp = 1"] if self.in_bytes else []
        return "\n".join(lines)

    def _of_mb(self, cell: TinyCell) -> int:
        per_pipe = self.microbatches // self.placement.num_pipes
        return self.of_mb[cell.pipe * per_pipe + cell.mb] if self.of_mb else 1

    def _plain(self, kind: Kind, cell: TinyCell) -> Fraction:
        """What an action takes where micro-batches are alike."""
        whole = self.base.get("b", self.base["i"] + self.base["w"])
        ticks = {Kind.F: self.base["f"], Kind.I: self.base["i"], Kind.W: self.base["w"], Kind.B: whole}[kind]
        return Fraction(self.factor[cell.stage]) * ticks

    def _ticks(self, kind: Kind, cell: TinyCell) -> int:
        return round(self._plain(kind, cell) * self._of_mb(cell) * TICKS)

    def _pair(self, one: TinyCell, other: TinyCell) -> int:
        """As docs/costs.md says: `fb` at the mean of two factors, or what is saved by it where layers are known."""
        apart = self.base["f"] + self.base.get("b", self.base["i"] + self.base["w"])
        both = self.base.get("fb", apart)
        mean = Fraction(self.factor[one.stage] + self.factor[other.stage]) / 2
        forward, backward = self._plain(Kind.F, one), self._plain(Kind.B, other)
        pair = forward + backward - (apart - both) * mean if self.in_bytes else both * mean
        if self.of_mb and forward + backward:
            pair *= (forward * self._of_mb(one) + backward * self._of_mb(other)) / (forward + backward)
        return round(pair * TICKS)

    def _rooms(self) -> tuple[tuple[Room, ...], MemoryLimits]:
        draw, rooms = self.draw, []
        count = bytes_ = None
        ones = dict.fromkeys(self.cells, 1)
        if draw.random() < 0.4:
            count = self._least(ones) + draw.choice((0, 0, 1, 2))
            rooms.append(Room(count, ones))
        if self.in_bytes:
            full = {cell: self.saved * self.saved_factor[cell.stage] * self._of_mb(cell) for cell in self.cells}
            bytes_ = self._least(full) + draw.choice((0, self.saved, 3 * self.saved))
            rooms.append(Room(bytes_, full))
        return tuple(rooms), MemoryLimits(max_activations=count, memory_limit=bytes_)

    def _least(self, size: dict[TinyCell, int]) -> int:
        """The least limit that is not refused: a micro-batch is on all chunks of a rank at once."""
        held: dict[tuple[int, int, int], int] = {}
        for cell in self.cells:
            key = cell.rank, cell.pipe, cell.mb
            held[key] = held.get(key, 0) + size[cell]
        return max(held.values())


TICKS = 720_720
"""Of a unit."""

_ROUNDED = 5
"""Ticks that are less than any difference that is drawn."""
