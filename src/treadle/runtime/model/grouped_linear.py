"""Linears of one shape in one parameter, each for rows of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from treadle.runtime.model.grouped_mm import RowGroups, grouped_mm, grouped_outer
from treadle.runtime.model.weight_grad import AddGradient, DefersWeightGrad, as_it_is, autocast_dtype


class _One(NamedTuple):
    """One of the linears, as `torch.distributed.checkpoint` looks for it by the name in the state dict."""

    weight: Tensor


class GroupedLinear(DefersWeightGrad):
    """`num` linears without bias as one parameter, `weight[num, out_features, in_features]`.

    Its state dict is that of an `nn.ModuleList` of `nn.Linear`, with an entry for each of them (`0.weight`,
    `1.weight`, ...), so either loads what the other saved; with one seed both begin with the same values.
    """

    def __init__(self, num: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, out_features, in_features))
        self.reset_parameters()

    def __len__(self) -> int:
        return len(self.weight)

    def __getitem__(self, number: int) -> _One:
        return _One(self.weight[number])

    def __getattr__(self, name: str) -> Any:
        return self[int(name)] if name.isdecimal() else super().__getattr__(name)

    _lower: tuple[Tensor, tuple[int, int]] | None = None
    """The weight in autocast's precision, and which memory and version of the weight it was made of."""

    def forget_lower(self) -> None:
        """Forget the weight in autocast's precision: a step begins."""
        self._lower = None

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in a precision. In a Pipeline a step converts it once."""
        weight = self.weight.detach()
        if weight.dtype is dtype or self._queue is None:
            return weight.to(dtype)
        of = weight.data_ptr(), weight._version
        if self._lower is None or self._lower[0].dtype is not dtype or self._lower[1] != of:
            self._lower = weight.to(dtype), of
        return self._lower[0]

    def extra_repr(self) -> str:
        """Shows the sizes."""
        num, out_features, in_features = self.weight.shape
        return f"num={num}, in_features={in_features}, out_features={out_features}"

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws each linear's values as `nn.Linear` does."""
        for weight in self.weight.detach():
            drawn = weight if generator is None else torch.empty_like(weight, device=generator.device)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            weight.copy_(drawn)

    def forward(self, rows: Tensor, groups: RowGroups) -> Tensor:
        """Runs linear g on the rows of group g, in autocast's precision if autocast is on."""
        if rows.dim() != 2 or len(rows) != groups.num_rows or len(groups.sizes) != len(self):
            raise ValueError(
                f"rows of shape {tuple(rows.shape)} do not fit {len(groups.sizes)} groups of {groups.num_rows} rows in "
                f"all, for {len(self)} linears; give [rows, features] and a group for each linear, 0 for no rows"
            )
        lower = autocast_dtype(rows, self.weight)
        rows = rows if lower is None else rows.to(lower)
        if lower is None and rows.dtype is not self.weight.dtype:
            raise ValueError(
                f"rows of {rows.dtype} do not fit a weight of {self.weight.dtype}; convert one of them, or use autocast"
            )
        out: Tensor = _GroupedLinear.apply(rows, self.weight, groups, self)  # type: ignore[no-untyped-call]
        return out

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        weights = self.weight if keep_vars else self.weight.detach()
        for number, weight in enumerate(weights):
            destination[_key(prefix, number)] = weight

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        keys = [_key(prefix, number) for number in range(len(self))]
        missing_keys += [key for key in keys if key not in state_dict]
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in keys]
        found = {number: state_dict[key] for number, key in enumerate(keys) if key in state_dict}
        for number, value in found.items():
            if value.shape != self.weight.shape[1:]:
                error_msgs.append(
                    f"size mismatch for {keys[number]}: the checkpoint has {tuple(value.shape)}, this module "
                    f"{tuple(self.weight.shape[1:])}"
                )
                return
        if local_metadata.get("assign_to_params_buffers", False) and len(found) == len(self):
            stacked = torch.stack(list(found.values()))
            self.weight = nn.Parameter(stacked, requires_grad=self.weight.requires_grad)
            return
        with torch.no_grad():
            for number, value in found.items():
                self.weight[number].copy_(value)


def _key(prefix: str, number: int) -> str:
    return f"{prefix}{number}.weight"


class _GroupedLinear(torch.autograd.Function):
    """All linears in one precision; their weight gradients can run apart."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, groups: RowGroups, linear: GroupedLinear) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.groups, ctx.linear, ctx.is_own = groups, linear, linear.has_own(weight)
        with as_it_is(rows):
            lower = linear.weight_as(rows.dtype) if ctx.is_own else weight.to(rows.dtype)
            return grouped_mm(rows, lower.transpose(1, 2), groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        groups: RowGroups = ctx.groups
        linear: GroupedLinear = ctx.linear

        def weight_half(rows: Tensor, grad: Tensor, add: AddGradient) -> None:
            add(linear.weight, grouped_outer(grad, rows, groups))

        again = torch.is_grad_enabled()  # with create_graph: what is computed here is differentiated itself
        apart = ctx.is_own and not again
        dx = dw = None
        with as_it_is(rows):
            if ctx.needs_input_grad[0]:
                lower = linear.weight_as(grad.dtype) if apart else weight.to(grad.dtype)
                dx = grouped_mm(grad, lower, groups)
            if ctx.needs_input_grad[1] and not (apart and linear.defer(rows, grad, weight_half)):
                dw = grouped_outer(grad, rows, groups).to(weight.dtype)
        return dx, dw, None, None
