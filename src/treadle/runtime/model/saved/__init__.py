"""What autograd saves between forward and backward: counted, and moved to the host and back where the Program says.

`SavedTensors` is what saved tensors go through, `pool` where they wait on the host, `LiveBytes` counts bytes alive.
"""

from treadle.runtime.model.saved.live_bytes import LiveBytes
from treadle.runtime.model.saved.pool import FilePool, PinnedPool, Pool, pool_for
from treadle.runtime.model.saved.store import SavedReport, SavedTensors

__all__ = ["FilePool", "LiveBytes", "PinnedPool", "Pool", "SavedReport", "SavedTensors", "pool_for"]
