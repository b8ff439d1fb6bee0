"""A rank's watch over the others: every rank names the rank that was lost first, and its op, within seconds.

contacts       how ranks find each other: contacts exchanged once over the given groups
links          the connections to a rank's neighbours
loss_messages  the messages on them, as msgspec structs
transport      the input and output of the thread: links, a listener, a selector
diagnosis      which rank to name, as pure functions of states and reports
incident       the knowledge of one rank about a loss, as a state machine
watchdog       the thread: messages, alarm, and the end of a process that does not react
watch          the interface of the main thread
loss           RankLostError and its words
"""

from treadle.runtime.faults.watch.loss import EXIT_LOST, RankLostError
from treadle.runtime.faults.watch.watch import Watch

__all__ = ["EXIT_LOST", "RankLostError", "Watch"]
