"""A trainer on a Pipeline: data, sharded optimizer, checkpoints, restarts, a line a step."""
