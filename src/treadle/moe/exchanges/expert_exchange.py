"""The interface of expert exchanges, for one layer. The state of a micro-batch is in its Routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from torch import Tensor

from treadle.moe.router import Routing
from treadle.runtime.model.segments import Segment


class TokenExchange(Protocol):
    """The steps of an exchange, in order. All but `leaving` are collective over the expert group, with a backward."""

    def leaving(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Return the rows to dispatch, from [token, width]."""
        ...

    @property
    def counting(self) -> Sequence[Segment]:
        """The segments counts and host, where ranks first learn how many rows each gets; else none."""
        ...

    def dispatch(self, leaving: Tensor, gates: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Routing]:
        """Return (rows for this rank's experts, the gates for `combine`, the routing with `rows` filled in)."""
        ...

    def combine(self, made: Tensor, gates: Tensor, routing: Routing) -> Tensor:
        """Return [token, width]: for each token the sum of its experts' outputs, weighted by its gates."""
        ...


MakeExchange: TypeAlias = Callable[[int], TokenExchange]
"""Makes the exchange of a layer of so many experts, those of all ranks."""
