"""Whether a rank's parameters lack the last update of other ranks, and refusals to read them while they do."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from treadle.runtime.model.parameters import Parameters


class StaleParameters:
    """The parameters of a pipeline, stale from an update by shards to the gather after it.

    A new `.data` makes them stale, too: an EMA swap, undone, may bring back values from before a gather.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._pointers: list[int] | None = None
        self._updated = False
        self._checks: list[Any] = []
        weakref.finalize(self, _remove, self._checks).atexit = False

    def watch(self) -> None:
        """Begin: an optimizer updates parameters by shards from now on, and they are whole."""
        self._pointers = self._parameters.pointers()
        if not self._checks:
            check = StateDictCheck(weakref.ref(self))
            for part in self._parameters.parts():
                self._checks.append(part.register_state_dict_pre_hook(check))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Take the checks from the modules."""
        _remove(self._checks)

    def __bool__(self) -> bool:
        return self._pointers is not None and (self._updated or self._pointers != self._parameters.pointers())

    def updated(self) -> None:
        """Each rank has updated its shards."""
        self._updated = True

    def gathered(self) -> None:
        """All shards have arrived."""
        self._updated = False
        if self._pointers is not None:
            self._pointers = self._parameters.pointers()


class StateDictCheck:
    """Refuses `state_dict()` of a module with stale parameters. Copies of the module come without it."""

    def __init__(self, stale: weakref.ref[StaleParameters] | None = None) -> None:
        self.stale = stale if stale is not None else lambda: None

    def __call__(self, *_: object) -> None:
        stale = self.stale()
        if stale:
            raise ValueError(
                "the parameters lack the last update of other ranks, which the next step gathers; call "
                "pipe.gather_parameters() of the Pipeline with the ShardedOptimizer on every rank first"
            )

    def __reduce__(self) -> tuple[type[StateDictCheck], tuple[()]]:
        return StateDictCheck, ()


def refuse_stale(modules: Iterable[nn.Module], own: StaleParameters | None = None) -> None:
    """Raise ValueError if the parameters of a module are stale in another Pipeline."""
    for module in modules:
        for check in module._state_dict_pre_hooks.values():
            if isinstance(check, StateDictCheck) and (own is None or check.stale() is not own):
                check()


def _remove(checks: list[Any]) -> None:
    while checks:
        checks.pop().remove()
