"""Messages between processes: one framing, typed bodies, links, listeners, seals.

`Link` blocks with a deadline, for any thread; the watch's `NeighbourLink` (treadle.runtime.faults.watch.links) never
blocks, as one thread serves all its connections from a selector: both read and write the same frames. One `Listener`
accepts both, holds so many that have not identified themselves, and waits where descriptors run out.
"""
