"""The coordinator beside update rank 0: it moves an attempt from phase to phase and decides."""
