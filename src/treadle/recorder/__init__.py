"""Flight Recorder dumps of torch: read without torch, matched with the schedule that ran, the hang named.

    files --dump_file--> RankDump --placing--> ops of a step --hang_graph--> who waits for whom --hang_cause--> cause

A reader knows files and entries and no schedule. Matching is by count: the k-th send of a channel is the k-th SEND of
that channel in the Program. What waits for what is the graph of `verifier/communicator_queues.py`, of the order in
which ranks launched their messages, with the ops that have ended taken out.
"""

from __future__ import annotations

from treadle.recorder.find_hang import find_hang
from treadle.recorder.hang_report import HangReport

__all__ = ["HangReport", "find_hang"]
