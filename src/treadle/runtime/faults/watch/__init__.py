"""One rank's eye on the others: who was lost first, at what, told on every rank within seconds.

progress   where a rank is, in memory that outlives it
meet       how ranks find each other: cards exchanged once over the given groups
links      the few connections of a rank, and the door through which they come
news       what is said over them, in bytes
verdict    which rank is to be named, as pure functions of what was said
case       all that one rank knows of a loss, and when it has settled
sentry     the thread that listens, tells, and ends what does not react
watch      what the main thread calls
"""

from treadle.runtime.faults.watch.loss import EXIT_LOST, RankLostError
from treadle.runtime.faults.watch.watch import Watch, waits_for_group

__all__ = ["EXIT_LOST", "RankLostError", "Watch", "waits_for_group"]
