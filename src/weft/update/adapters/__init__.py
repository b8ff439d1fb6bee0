"""Engines that take updates: one small class each, between an engine and Weft's endpoint."""

from weft.update.adapters.interface import Adapter
from weft.update.adapters.plain import Plain

__all__ = ["Adapter", "Plain"]
