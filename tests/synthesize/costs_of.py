"""Costs of cells as text, for tests."""

from __future__ import annotations

from treadle.costs import Costs, parse


def cell_costs(f: float, i: float, w: float, *, send: float = 0, more: str = "") -> Costs:
    """Costs in abstract units; `more` is put behind."""
    return parse(
        f'name = "cells"\nunit = "unit"\n[cells]\nf = {f}\ni = {i}\nw = {w}\n[message]\nsend = {send}\n{more}\n'
    )


PUBLISHED = cell_costs(18, 18, 9, send=1)
"""F, I, W and communication of the zero-bubble paper's largest model, rounded."""
