"""The interface of expert exchanges, for one layer. The state of a micro-batch is in its Routing."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from treadle.moe.router import Routing


class TokenExchange(Protocol):
    """The steps of an exchange, in order. All but `leaving` are collective over the expert group and have a backward.

    If it is not `counted`, `count` and `wait` are not called, and a layer has no segments for them.
    """

    counted: bool

    def leaving(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Return the rows to dispatch, from [token, width]."""
        ...

    def count(self, routing: Routing) -> Routing:
        """Tells every rank how many rows it will get."""
        ...

    def wait(self, routing: Routing) -> Routing:
        """Brings those numbers to the host."""
        ...

    def dispatch(self, leaving: Tensor, gates: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Routing]:
        """Return (rows for this rank's experts, the gates for `combine`, the routing with `rows` filled in)."""
        ...

    def combine(self, made: Tensor, gates: Tensor, routing: Routing) -> Tensor:
        """Return [token, width]: for each token the sum of its experts' outputs, weighted by its gates."""
        ...


class MakeExchange(Protocol):
    """Makes the exchange of a layer of so many experts, those of all ranks."""

    def __call__(self, num_experts: int) -> TokenExchange:
        """Return the exchange."""
        ...
