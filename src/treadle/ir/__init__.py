"""The data types that all layers share: actions, cells, schedules, programs, and the one dependency rule.

Ops are stored lane by lane, so the op before op `i` on its lane is `i - 1` and needs no column. Lanes have a group
number; which ops of a group run together follows from their positions alone, as on a real channel, and is never
stored. No step holds a Python object for every op. Memory is read off the times of the one execution, launch orders
are its order.
"""

from treadle.ir.action import Action, B, Cell, F, I, Kind, Pair, W
from treadle.ir.placement import Placement
from treadle.ir.schedule import Channel, Row, Schedule

__all__ = ["Action", "B", "Cell", "Channel", "F", "I", "Kind", "Pair", "Placement", "Row", "Schedule", "W"]
