"""What this rank is doing and whom it waits for, readable by other processes."""
