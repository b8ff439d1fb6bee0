"""How many bytes of saved tensors are alive on the device."""

from __future__ import annotations

import threading

from torch import Tensor


class Ledger:
    """Counts storages, each once however many hold it. Lanes are threads, so it has a lock.

    A storage is known by its address: whoever is in the ledger keeps it alive, so nobody else can have that address.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._lock = threading.Lock()
        self.live_bytes = 0
        self.peak_bytes = 0

    def begin(self) -> None:
        """A new peak from here on."""
        with self._lock:
            self.peak_bytes = self.live_bytes

    def hold(self, tensor: Tensor) -> int:
        """One more holds this tensor's storage; what to `release` it by."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        with self._lock:
            holders = self._holders.get(address, 0)
            self._holders[address] = holders + 1
            if not holders:
                self.live_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return address

    def release(self, address: int, size_bytes: int) -> None:
        """One holder less."""
        with self._lock:
            holders = self._holders.pop(address) - 1
            if holders:
                self._holders[address] = holders
            else:
                self.live_bytes -= size_bytes
