"""The Pareto front of step time and memory."""

from __future__ import annotations

from bisect import bisect_right


class Front:
    """Pairs (time, memory) of which none is beaten in both; least in both is best.

    Example:
        >>> front = Front()
        >>> [front.add(*pair) for pair in ((10, 5), (8, 7), (9, 9))]
        [True, True, False]
        >>> front.pairs
        [(8, 7), (10, 5)]

    """

    def __init__(self) -> None:
        self.pairs: list[tuple[int, int]] = []
        """By time; so memory falls along it."""

    def beats(self, time: int, memory: int) -> bool:
        """True if a pair of the front is no worse in either, and better in one."""
        place = bisect_right(self.pairs, (time, memory))
        if not place:
            return False
        _, least = self.pairs[place - 1]
        return least <= memory and self.pairs[place - 1] != (time, memory)

    def add(self, time: int, memory: int) -> bool:
        """Add a pair and drop those that it beats; return whether it belongs to the front."""
        if self.beats(time, memory):
            return False
        self.pairs = [(t, m) for t, m in self.pairs if t < time or m < memory]
        self.pairs.insert(bisect_right(self.pairs, (time, memory)), (time, memory))
        return True
