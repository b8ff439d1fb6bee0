"""Engines that take updates: one small class each, between an engine and Treadle's endpoint."""

from treadle.update.adapters.interface import Adapter
from treadle.update.adapters.plain import Plain

__all__ = ["Adapter", "Plain"]
