"""A search as it is watched: how far it is, and the best job so far, which an interrupt leaves."""

from __future__ import annotations

from collections.abc import Callable

from treadle.cli.terminal import Advance, note, working
from treadle.planner import SearchResult
from treadle.planner.job_estimate import describe


def watched_search(find: Callable[..., SearchResult]) -> tuple[SearchResult, bool]:
    """Search with a progress bar that names the best job so far; Ctrl-C ends the search with that job.

    Args:
        find: the search; it takes `progress` and `on_better`, as `find_plan` does.

    Returns:
        What was found, and whether the search was interrupted.

    Raises:
        KeyboardInterrupt: it was, before anything was found.

    """
    with working("searching") as advance:
        watch = _Watch(advance)
        try:
            return find(progress=watch.progress, on_better=watch.better), False
        except KeyboardInterrupt:
            if watch.found is None:
                raise
    note("interrupted: this is the best job so far; the alternatives were not searched")
    return watch.found, True


class _Watch:
    def __init__(self, advance: Advance) -> None:
        self._advance, self._what = advance, "searching"
        self.found: SearchResult | None = None

    def progress(self, done: int, total: int) -> None:
        """Show how far the search is."""
        self._advance(done, total, self._what)

    def better(self, found: SearchResult) -> None:
        """Show a job that is better than all before it."""
        self.found = found
        self._what = f"so far {found.best.step_s:.3f} s: {describe(found.best.job)}"
