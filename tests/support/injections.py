"""Errors put into a step at any call of it, in the process that runs it: each raises once.

    injections = Injections()
    pipe = InjectedPipeline(injections, stages, schedule, mesh=mesh, loss_fn=loss_fn)
    model = nn.Sequential(nn.Linear(4, 4), Tripwire(injections))
    injections.arm("W launch", turn=2)          # the third time in a step

A site is a call of an op by its kind ("F launch", "REDUCE_GRAD prepare"), the forward or the backward of a `Tripwire`,
or a method that `watch` was given. An error comes before the call, or after it where the site ends in "after".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import treadle
from treadle.ir.ops import OpKind
from treadle.ir.program import Op
from treadle.runtime.rank_part import RankPart
from treadle.runtime.run.handlers import Handler, OpCalls
from treadle.runtime.run.rank_program import RankProgram


class InjectedError(ArithmeticError):
    """The error of a site: of a type that no wait for another rank raises."""


class Injections:
    """The sites of one pipeline, how often a step came by each, and the one that is to raise."""

    def __init__(self) -> None:
        self.turns: Counter[str] = Counter()
        self._armed: tuple[str, int] | None = None

    def arm(self, site: str, turn: int = 0) -> None:
        """Lets a site raise at its `turn`-th call from now on, counted from 0."""
        self.turns.clear()
        self._armed = (site, turn)

    def reach(self, site: str) -> None:
        """Counts a call of a site, and raises if it is the one."""
        turn = self.turns[site]
        self.turns[site] += 1
        if self._armed == (site, turn):
            self._armed = None
            raise InjectedError(site)

    def handlers(self, handlers: Mapping[OpKind, Handler]) -> dict[OpKind, Handler]:
        """Returns the handlers of all ops, with sites around their calls."""
        return {kind: self._around(handler) for kind, handler in handlers.items()}

    def watch(self, owner: object, *names: str) -> None:
        """Puts sites around methods of an object."""
        for name in names:
            setattr(owner, name, self._sited(name, getattr(owner, name)))

    def _around(self, handler: Handler) -> Handler:
        def handle(part: RankProgram, op: Op) -> OpCalls:
            calls: dict[str, Any] = handler(part, op)._asdict()
            for name, run in calls.items():
                calls[name] = None if run is None else self._sited(f"{op.kind.name} {name}", run)
            return OpCalls(**calls)

        return handle

    def _sited(self, site: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def sited(*args: Any, **kwargs: Any) -> Any:
            self.reach(site)
            made = run(*args, **kwargs)
            self.reach(f"{site} after")
            return made

        return sited


class InjectedPipeline(treadle.Pipeline):
    """A Pipeline with sites around the calls of its ops."""

    def __init__(self, injections: Injections, *args: Any, **given: Any) -> None:
        self._injections = injections
        super().__init__(*args, **given)

    def instrument(self, part: RankPart) -> RankPart:
        """Returns the part with sites."""
        return replace(part, handlers=self._injections.handlers(part.handlers))


class Tripwire(nn.Module):
    """Hands its input on; its forward and its backward are sites."""

    def __init__(self, injections: Injections) -> None:
        super().__init__()
        self.injections = injections

    def forward(self, x: Tensor) -> Tensor:
        """Returns the input."""
        self.injections.reach("module forward")
        out: Tensor = _Trip.apply(x, self.injections)  # type: ignore[no-untyped-call]
        return out


class _Trip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, injections: Injections) -> Tensor:
        ctx.injections = injections
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.injections.reach("module backward")
        return grad, None
