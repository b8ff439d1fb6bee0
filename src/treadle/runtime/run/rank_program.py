"""What the handlers of a rank's ops work on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from treadle.dist.boundary import Boundary
from treadle.dist.channel import Channel
from treadle.ir.program import Program
from treadle.runtime.model.chunk import Chunk
from treadle.runtime.model.gradients import Gradients
from treadle.runtime.model.parameter_bucket import BucketNumber, ParameterBucket


@dataclass
class RankProgram:
    """A rank's view of its Program: the stages it holds, the channels to its peers, the gradients it sums, the
    parameters it gathers.

    `outgoing` and `incoming` have the peers' ranks along pp as keys; `global_rank` turns those into ranks of the world.
    """

    program: Program
    pp_rank: int
    stages: Mapping[int, Chunk]
    outgoing: Mapping[int, Channel]
    incoming: Mapping[int, Channel]
    gradients: Gradients
    global_rank: Callable[[int], int]
    parameters: Mapping[BucketNumber, Sequence[ParameterBucket]] = field(default_factory=dict)
    boundaries: dict[int, Boundary] = field(default_factory=dict)
    """The shapes of a chunk's inputs, from the header of their first message on."""

    @property
    def differ(self) -> bool:
        """Whether micro-batches of this step have shapes of their own, with a header ahead of each message."""
        return any(stage.differ for stage in self.stages.values())

    def neighbour(self, chunk: int, step: int) -> Chunk | None:
        """Return the stage after (+1) or before (-1) this one if the same rank holds it: nothing is sent then."""
        held = self.program.layout.placement.neighbour(self.pp_rank, chunk, step)
        return self.stages[held[1]] if held is not None and held[0] == self.pp_rank else None
