"""What autograd saves between forward and backward: counted, and moved to the host and back where the Program says.

`Store` is what saved tensors go through, `pool` where they wait on the host, `Ledger` how many bytes are alive.
"""

from treadle.runtime.model.saved.ledger import Ledger
from treadle.runtime.model.saved.pool import FilePool, PinnedPool, Pool, pool_for
from treadle.runtime.model.saved.store import SavedReport, Store

__all__ = ["FilePool", "Ledger", "PinnedPool", "Pool", "SavedReport", "Store", "pool_for"]
