"""A rank's progress, readable by other processes: its op, and the ranks it waits for."""
