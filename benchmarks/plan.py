"""How fast a plan is searched: `python benchmarks/plan.py [--model deepseek-v3] [--cluster h800:2048] ...`.

1. Seconds of the search of a large cluster: to the first answer, and in all; and how much slower the first answer's
   step is than the fastest.
2. On 50 random small searches: whether the search that passes over what bounds rule out advises the same job as the
   search of all candidates.

The last line is JSON. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

from random_searches import random_search
from treadle.planner import SearchResult, SearchSpace, find_plan, search
from treadle.planner.job_estimate import describe

SEARCHES = 50


def _advice(seed: int, *, bounded: bool) -> str:
    """Return the advised job and the fastest of a random search, or that nothing fits."""
    points, limit = random_search(seed)
    try:
        found = search(points, limit, bounded=bounded, many=0)
    except ValueError:
        return "nothing fits"
    return f"{describe(found.best.job)}; fastest {describe(found.fastest.job)}"


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="deepseek-v3")
    parser.add_argument("--cluster", default="h800:2048")
    parser.add_argument("--precision", default="fp8")
    parser.add_argument("--searches", type=int, default=SEARCHES)
    asked = parser.parse_args()
    begin, answers = time.perf_counter(), []

    def better(found: SearchResult) -> None:
        answers.append((time.perf_counter() - begin, found.best.step_s))
        print(f"{answers[-1][0]:6.1f} s  {answers[-1][1]:8.3f} s  {describe(found.best.job)}")

    space = SearchSpace(balanced=(True,), precision=(asked.precision,))
    found = find_plan(asked.model, asked.cluster, space=space, on_better=better)
    whole_s = time.perf_counter() - begin
    print(f"{whole_s:6.1f} s  {found.best.step_s:8.3f} s  {describe(found.best.job)}, of {found.num_candidates:,}")
    different = []
    for seed in range(asked.searches):
        some, every = (_advice(seed, bounded=bounded) for bounded in (True, False))
        if some != every:
            different.append(seed)
            print(f"search {seed}: {some}, of all candidates {every}")
    result = {
        "candidates": found.num_candidates,
        "simulated": found.num_simulated,
        "first_answer_s": round(answers[0][0] if answers else whole_s, 1),
        "first_answer_slower": round(
            (answers[0][1] if answers else found.fastest.step_s) / found.fastest.step_s - 1, 4
        ),
        "whole_s": round(whole_s, 1),
        "searches": asked.searches,
        "same_best": asked.searches - len(different),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
