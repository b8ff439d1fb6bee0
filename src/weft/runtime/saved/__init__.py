"""What autograd saves between forward and backward: counted, and moved to the host and back where the Program says.

`Store` is what saved tensors go through, `pool` where they wait on the host, `Ledger` how many bytes are alive.
"""

from weft.runtime.saved.ledger import Ledger
from weft.runtime.saved.pool import FilePool, PinnedPool, Pool, pool_for
from weft.runtime.saved.store import SavedReport, Store

__all__ = ["FilePool", "Ledger", "PinnedPool", "Pool", "SavedReport", "Store", "pool_for"]
