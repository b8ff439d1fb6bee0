"""What ranks hold at most, and units of time, as commands print them."""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypedDict

from treadle.fields.kinds import Amount, OneOf

TimeUnit: TypeAlias = Annotated[
    str, OneOf(("unit", "us", "ms")), "The unit of all times here: unit (abstract), us or ms."
]


class PeakJson(TypedDict):
    """What each rank holds at most, as it is printed."""

    unit: Annotated[
        str,
        OneOf(("bytes", "layers", "activations")),
        "What peaks count: bytes; layers, each of a micro-batch; or activations, each of a chunk and a micro-batch.",
    ]
    most: Annotated[Amount, "The highest peak of any rank, in this unit."]
    ranks: Annotated[list[Amount], "The peak of each rank, in this unit."]
