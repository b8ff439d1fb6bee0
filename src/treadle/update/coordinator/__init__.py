"""The coordinator: a thread of update rank 0 that moves an attempt from phase to phase, and decides."""
