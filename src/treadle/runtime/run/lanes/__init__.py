"""Lanes are in-order queues. An op runs when the ops that it waits for have ended.

The interface is `Lanes`: launch this call on a lane after those ops. Backends:

    thread    computation in the calling thread, every other lane in a thread of its own
    paced     as thread, but an op takes the time of its cost, asleep
    serial    each call at once in the calling thread: at cell granularity, and the same step without overlap
    virtual   the calling thread, with a clock that only counts; it tests orders and measures nothing
    stream    a device's stream for each lane, events between them
"""

from treadle.runtime.run.lanes.lane import Lanes
from treadle.runtime.run.lanes.paced import PacedLanes
from treadle.runtime.run.lanes.serial import SerialLanes
from treadle.runtime.run.lanes.stream import StreamLanes
from treadle.runtime.run.lanes.thread import ThreadLanes
from treadle.runtime.run.lanes.virtual import VirtualLanes

__all__ = ["Lanes", "PacedLanes", "SerialLanes", "StreamLanes", "ThreadLanes", "VirtualLanes"]
