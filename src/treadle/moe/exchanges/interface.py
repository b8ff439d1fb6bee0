"""What every backend of an expert exchange does, for one layer. What it did to a micro-batch is in the Routing."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from treadle.moe.router import Routing


class TokenExchange(Protocol):
    """The steps in their order; all but `leaving` are done by the ranks of a group together, and have a backward.

    Where it is not `counted`, `count` and `wait` are not called, and a layer has no segments for them.
    """

    counted: bool

    def leaving(self, tokens: Tensor, routing: Routing) -> Tensor:
        """From [token, width] to what is dispatched."""
        ...

    def count(self, routing: Routing) -> Routing:
        """Tells every rank how many rows it will get."""
        ...

    def wait(self, routing: Routing) -> Routing:
        """Brings those numbers to the host."""
        ...

    def dispatch(self, leaving: Tensor, gates: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Routing]:
        """(rows for this rank's experts, the gates that `combine` wants, the routing with `rows` filled in)."""
        ...

    def combine(self, made: Tensor, gates: Tensor, routing: Routing) -> Tensor:
        """From what the experts made of the rows to [token, width]: of each token the sum, weighted by its gates."""
        ...


class MakeExchange(Protocol):
    """Makes the exchange of a layer of so many experts, those of all ranks."""

    def __call__(self, num_experts: int) -> TokenExchange:
        """The exchange."""
        ...
