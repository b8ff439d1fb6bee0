"""Sends tokens to their experts and back: one interface, `TokenExchange`, and its backends.

all_to_all   a row for each (token, expert), over torch.distributed; counts go ahead, and the host waits for them
deepep       a token once to each rank, by DeepEP's kernels, where that is installed; it waits for counts itself
"""

from typing import Literal, TypeAlias

from treadle.moe.exchanges.all_to_all import AllToAll
from treadle.moe.exchanges.deepep import DeepEP
from treadle.moe.exchanges.expert_exchange import MakeExchange, TokenExchange

ExchangeName: TypeAlias = Literal["all_to_all", "deepep"]

EXCHANGES: dict[ExchangeName, MakeExchange] = {"all_to_all": AllToAll, "deepep": DeepEP}


def make_exchange(exchange: ExchangeName | MakeExchange, num_experts: int) -> TokenExchange:
    """Make the exchange of one layer, by its name or by what makes it."""
    if not isinstance(exchange, str):
        return exchange(num_experts)
    if exchange not in EXCHANGES:
        raise ValueError(f"an exchange is one of {', '.join(EXCHANGES)}, got {exchange!r}")
    return EXCHANGES[exchange](num_experts)


__all__ = ["EXCHANGES", "AllToAll", "DeepEP", "ExchangeName", "MakeExchange", "TokenExchange", "make_exchange"]
