"""Adapters: one small class for each engine, between the engine and Treadle's endpoint."""

from treadle.update.adapters.plain import Plain
from treadle.update.worker.adapter import Adapter

__all__ = ["Adapter", "Plain"]
