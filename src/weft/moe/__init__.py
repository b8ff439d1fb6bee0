"""Mixture-of-experts layers whose exchange runs beside other computation.

    layer = weft.moe.MoELayer(width=512, hidden=1024, num_experts=8, top_k=2, ep=2)

`Router` chooses experts, `Experts` are a rank's own, `EXCHANGES` are the ways of tokens to experts and back, `MoELayer`
puts them together as segments. `Exchange` moves rows, for a layer of your own.
"""

from weft.moe.exchanges import EXCHANGES, TokenExchange
from weft.moe.experts import Experts
from weft.moe.layer import MoELayer
from weft.moe.router import Router, Routing
from weft.runtime.exchange import Exchange

__all__ = ["EXCHANGES", "Exchange", "Experts", "MoELayer", "Router", "Routing", "TokenExchange"]
