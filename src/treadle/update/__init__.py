"""Weight updates: new weights from a trainer's ranks into running inference workers, committed or not at all."""

from typing import TYPE_CHECKING, Any

from treadle.update.adapters import Adapter, Plain
from treadle.update.errors import UpdateError
from treadle.update.options import UpdateOptions
from treadle.update.worker.endpoint import Endpoint
from treadle.update.worker.gate import ClosedError, Gate

if TYPE_CHECKING:
    from treadle.update.rank.source import Source, WeightSource
    from treadle.update.updated import Updated
    from treadle.update.updater import Updater

__all__ = [
    "Adapter",
    "ClosedError",
    "Endpoint",
    "Gate",
    "Plain",
    "Source",
    "UpdateError",
    "UpdateOptions",
    "Updated",
    "Updater",
    "WeightSource",
]

_OF_RANKS = {"Source": "rank.source", "Updated": "updated", "Updater": "updater", "WeightSource": "rank.source"}


def __getattr__(name: str) -> Any:
    """What only update ranks need is imported when it is asked for: a worker has an engine of its own to start."""
    if name not in _OF_RANKS:
        raise AttributeError(f"module 'treadle.update' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"treadle.update.{_OF_RANKS[name]}"), name)
