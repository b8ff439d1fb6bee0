"""The parameters a Pipeline was made with.

Which parameters train is part of the plan: reductions, float32 sums and weight halves are laid out for them once. A
parameter that begins to train later would be missing from all three without an error, so a step refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_

import torch
from torch import nn


class Parameters:
    """A record of all parameters of a rank's chunks: which they are, whether they train, their type."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self._parts = [(chunk, name, part) for chunk in modules for name, part in modules[chunk].named_modules()]
        self._children = self._children_now()
        self._params = self._params_now()
        self._state = _state(self._params)

    def check(self) -> None:
        """Raises ValueError if a parameter was unfrozen, frozen, replaced, added, removed or converted since."""
        children, params = self._children_now(), self._params_now()
        same = len(params) == len(self._params) and all(map(is_, params, self._params))
        same = same and len(children) == len(self._children) and all(map(is_, children, self._children))
        if not same or _state(params) != self._state:
            raise ValueError(
                f"{self._what_changed()} after the Pipeline was made; what trains, and in which type, is part of its "
                "plan: close() this Pipeline, and make a new one after the change"
            )

    def parts(self) -> list[nn.Module]:
        """Return all modules, each by every path to it."""
        return [part for _, _, part in self._parts]

    def pointers(self) -> list[int]:
        """Return where the parameters are in memory; a new `.data` moves one."""
        return [param.data_ptr() for param in self._params if param is not None]

    def _children_now(self) -> list[nn.Module | None]:
        return [child for _, _, part in self._parts for child in part._modules.values()]

    def _params_now(self) -> list[nn.Parameter | None]:
        return [param for _, _, part in self._parts for param in part._parameters.values()]

    def _what_changed(self) -> str:
        """Names the first parameter that differs."""
        known = {id(param): state for param, state in zip(self._params, self._state, strict=True) if param is not None}
        for chunk, path, part in self._parts:
            for name, param in part._parameters.items():
                where = f"chunk {chunk}: parameter {f'{path}.' if path else ''}{name}"
                if param is not None and id(param) not in known:
                    return f"{where} was added or replaced"
                if param is not None and known[id(param)] != (now := _state([param])[0]):
                    (trained, dtype), (trains, type_now) = known[id(param)], now
                    if trained is not trains:
                        return f"{where} was {'un' if trains else ''}frozen (requires_grad = {trains})"
                    return f"{where} was converted from {dtype} to {type_now}"
        return "a parameter or a module was added, replaced or removed"


def _state(params: list[nn.Parameter | None]) -> list[tuple[bool, torch.dtype | None]]:
    return [(param.requires_grad, param.dtype) if param is not None else (False, None) for param in params]
