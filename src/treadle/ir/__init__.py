"""The data types that all layers share: actions, cells, schedules, programs, and the one dependency rule."""

from treadle.ir.action import Action, B, Cell, F, I, Kind, Pair, W
from treadle.ir.placement import Placement
from treadle.ir.schedule import Channel, Row, Schedule

__all__ = ["Action", "B", "Cell", "Channel", "F", "I", "Kind", "Pair", "Placement", "Row", "Schedule", "W"]
