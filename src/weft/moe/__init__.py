"""Mixture-of-experts layers whose exchange runs beside other computation.

    layer = weft.moe.MoELayer(width=512, hidden=1024, num_experts=8, top_k=2, ep=2)

`Router` chooses experts, `Experts` are a rank's own, `Exchange` moves tokens, `MoELayer` puts them together as
segments.
"""

from weft.moe.experts import Experts
from weft.moe.layer import MoELayer
from weft.moe.router import Router, Routing
from weft.runtime.exchange import Exchange

__all__ = ["Exchange", "Experts", "MoELayer", "Router", "Routing"]
