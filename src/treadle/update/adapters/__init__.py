"""Adapters: one small class for each engine, between the engine and Treadle's endpoint."""

from treadle.update.adapters.interface import Adapter
from treadle.update.adapters.plain import Plain

__all__ = ["Adapter", "Plain"]
