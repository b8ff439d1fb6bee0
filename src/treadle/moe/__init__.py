"""Mixture-of-experts layers whose exchange runs beside other computation.

    layer = treadle.moe.MoELayer(width=512, hidden=1024, num_experts=8, top_k=2, ep=2)

`Router` chooses experts, `Experts` are a rank's own, `EXCHANGES` are the ways of tokens to experts and back.
`RoutedLayer` puts them together as segments, after an attention and under names that a subclass gives: `MoELayer` is
one, the layers of `treadle.models` are others. `Exchange` moves rows, for segments of your own.
"""

from treadle.host.extras import brought_by

with brought_by("run", needed_by="treadle.moe"):
    from treadle.moe.exchanges import EXCHANGES, TokenExchange
    from treadle.moe.experts import Experts
    from treadle.moe.layer import MoELayer, RoutedLayer
    from treadle.moe.router import Router, Routing
    from treadle.runtime.model.exchange import Exchange

__all__ = ["EXCHANGES", "Exchange", "Experts", "MoELayer", "RoutedLayer", "Router", "Routing", "TokenExchange"]
