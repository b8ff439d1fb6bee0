"""Lanes: in-order queues on which ops run, each as soon as what it waits for has ended.

One small interface, `Lanes`: launch this on a lane after those ops. Backends:

    thread    computation in the calling thread, every other lane in a thread of its own
    paced     as thread, but an op takes the time its cost says, without using the CPU
    serial    everything in the calling thread, one op after the other: the same step, not overlapped
    virtual   everything in the calling thread, on a clock that only counts; to test orders with, never a measurement
    cuda      a stream a lane, events between them
"""

from treadle.runtime.run.lanes.cuda import CudaLanes
from treadle.runtime.run.lanes.interface import Lanes
from treadle.runtime.run.lanes.paced import PacedLanes
from treadle.runtime.run.lanes.serial import SerialLanes
from treadle.runtime.run.lanes.thread import ThreadLanes
from treadle.runtime.run.lanes.virtual import VirtualLanes

__all__ = ["CudaLanes", "Lanes", "PacedLanes", "SerialLanes", "ThreadLanes", "VirtualLanes"]
