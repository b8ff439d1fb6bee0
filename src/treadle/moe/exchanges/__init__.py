"""Sends tokens to their experts and back: one interface, `TokenExchange`, and its backends.

all_to_all   a row for each (token, expert), over torch.distributed; counts go ahead, and the host waits for them
deepep       a token once to each rank, by DeepEP's kernels, where that is installed; it waits for counts itself
"""

from treadle.moe.exchanges.all_to_all import AllToAll
from treadle.moe.exchanges.deepep import DeepEP
from treadle.moe.exchanges.expert_exchange import MakeExchange, TokenExchange

EXCHANGES: dict[str, MakeExchange] = {"all_to_all": AllToAll, "deepep": DeepEP}


def make_exchange(name: str, num_experts: int) -> TokenExchange:
    """Make the exchange of one layer."""
    if name not in EXCHANGES:
        raise ValueError(f"an exchange is one of {', '.join(EXCHANGES)}, got {name!r}")
    return EXCHANGES[name](num_experts)


__all__ = ["EXCHANGES", "AllToAll", "DeepEP", "TokenExchange", "make_exchange"]
