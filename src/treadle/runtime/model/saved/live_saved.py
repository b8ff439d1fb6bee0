"""Counts the bytes of tensors that are held on the device."""

from __future__ import annotations

import threading
from collections import deque

from torch import Tensor


class LiveBytes:
    """Counts storages, each once however many hold it, on the meta device too.

    A storage is known by its address, so whoever holds one keeps it alive until it has been released: an address that
    is free is soon another's. Lanes are threads, so counting has a lock. Releases only queue up, since a tensor's end
    can come at any point, in the middle of counting too; they are counted before anything else is.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._released: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()
        self._live = self._peak = 0

    @property
    def live_bytes(self) -> int:
        """Returns the bytes alive now."""
        with self._lock:
            self._settle()
            return self._live

    @property
    def peak_bytes(self) -> int:
        """Returns the most bytes alive at once since `begin`."""
        return self._peak

    def begin(self) -> None:
        """Starts a new peak."""
        self._peak = self.live_bytes

    def hold(self, tensor: Tensor) -> int:
        """Adds a holder of this tensor's storage; returns the key for `release`."""
        storage = tensor.untyped_storage()
        address: int = storage._cdata
        size_bytes = storage.nbytes()
        with self._lock:
            self._settle()
            holders = self._holders.get(address, 0)
            self._holders[address] = holders + 1
            if not holders:
                self._live += size_bytes
                self._peak = max(self._peak, self._live)
        return address

    def release(self, address: int, size_bytes: int) -> None:
        """Removes a holder. The storage must still be alive."""
        self._released.append((address, size_bytes))

    def _settle(self) -> None:
        while self._released:
            address, size_bytes = self._released.popleft()
            holders = self._holders.pop(address) - 1
            if holders:
                self._holders[address] = holders
            else:
                self._live -= size_bytes
