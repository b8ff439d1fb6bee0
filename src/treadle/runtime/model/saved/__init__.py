"""Counts the tensors that autograd saves for backward, and offloads them where the Program says so.

`SavedTensors` takes saved tensors, `pool` has the host's memory for them, `LiveBytes` counts bytes alive.
"""

from treadle.runtime.model.saved.live_saved import LiveBytes
from treadle.runtime.model.saved.pool import FilePool, PinnedPool, Pool, pool_for
from treadle.runtime.model.saved.saved_store import SavedReport, SavedTensors

__all__ = ["FilePool", "LiveBytes", "PinnedPool", "Pool", "SavedReport", "SavedTensors", "pool_for"]
