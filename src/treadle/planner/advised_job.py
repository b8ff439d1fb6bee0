"""The advised job: of those that the estimate cannot tell apart from the fastest, the one with fewest moving parts."""

from __future__ import annotations

from collections.abc import Iterable

from treadle.estimate import Job
from treadle.planner.job_estimate import JobEstimate, describe
from treadle.planner.memory_margin import leaves_margin
from treadle.planner.moving_parts import MovingParts, moving_parts, parts_left_out
from treadle.planner.run_errors import run_errors
from treadle.planner.simulated_step import NEAR


class Advisor:
    """Finds the advised job among those that fit, and keeps what it simulates.

    Jobs are bounded by the least time they can take: one that takes longer than the fastest and the error allow is
    never simulated. A simpler job that may be fast enough always is.
    """

    def __init__(self, fitting: Iterable[JobEstimate], memory_limit: int) -> None:
        self._by_parts: dict[MovingParts, list[JobEstimate]] = {}
        for each in fitting:
            self._by_parts.setdefault(moving_parts(each.job), []).append(each)
        self._limit = memory_limit
        self.simulated: dict[Job, JobEstimate] = {}
        """What was simulated on the way, by job."""

    def advise(self, fastest: JobEstimate) -> JobEstimate:
        """Return the simplest job whose step is within the error of the fastest; of equally simple ones the fastest.

        Jobs that leave a margin of memory come first; without one of them, all that fit.
        """
        longest = within_error_s(fastest)
        for margin in (True, False):
            for parts in sorted(self._by_parts):
                jobs = [each for each in self._by_parts[parts] if not margin or leaves_margin(each, self._limit)]
                if not margin and parts >= moving_parts(fastest.job):
                    return fastest
                found = self._fastest(jobs, longest)
                if found is not None and (not margin or leaves_margin(found, self._limit)):
                    return found
        return fastest

    def _fastest(self, jobs: list[JobEstimate], longest: float) -> JobEstimate | None:
        """Return the fastest of equally simple jobs, simulated whole, or None if all take too long or too much."""
        groups: dict[object, list[JobEstimate]] = {}  # those of one structure share Programs
        for each in sorted(jobs, key=lambda each: each.least):
            if each.least_s <= longest:
                groups.setdefault(each.structure, []).append(each)
        timed = [each.simulated() for group in groups.values() for each in group]
        self.simulated |= {each.job: each for each in timed}
        best: JobEstimate | None = None
        for each in sorted(timed, key=lambda each: (each.step_s, describe(each.job))):
            if each.step_s > (longest * NEAR if best is None else best.step_s):
                break
            exact = self.simulated[each.job] = each.simulated_whole()
            fast = exact.step_s <= longest if best is None else exact.step_s < best.step_s
            if fast and exact.memory_bytes <= self._limit:
                best = exact
        return best


def rank_of(each: JobEstimate, limit: int) -> tuple[bool, MovingParts, float]:
    """Return what orders jobs that the estimate cannot tell apart: the margin of memory, moving parts, the step."""
    return not leaves_margin(each, limit), moving_parts(each.job), each.step_s


def within_error_s(fastest: JobEstimate) -> float:
    """Return the longest step, in seconds, that the errors of pairs of runs leave as fast as the fastest job."""
    return fastest.step_s * (1 + run_errors(fastest.job).pair)


def reason_text(best: JobEstimate, fastest: JobEstimate) -> str:
    """Return why the advised job is not the fastest; "" if it is."""
    if best.job == fastest.job:
        return ""
    slower, error = best.step_s / fastest.step_s - 1, run_errors(fastest.job).pair
    left_out = parts_left_out(best.job, fastest.job)
    simpler = f"fewer moving parts: {left_out}" if left_out else "it leaves a margin of memory"
    return (
        f"{100 * slower:.1f} % slower than the fastest ({describe(fastest.job)}), within the {100 * error:.1f} % that "
        f"ratios of published runs are off; {simpler}"
    )
