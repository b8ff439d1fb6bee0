"""How fast a plan is searched: `python benchmarks/plan.py [--model deepseek-v3] [--cluster h800:2048]`.

1. The CPU time of a search of all candidates with micro-batches of one sequence: about 10,000. And of an even draw of
   1,000 of them, with bounds and without; a draw shares fewer Programs.
2. Whether both find the same best job and the same front, on these 1,000.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

from treadle.estimate import load_cluster, load_model
from treadle.planner import SearchResult, SearchSpace, search
from treadle.planner.find_plan import usable_bytes
from treadle.planner.job_estimate import describe
from treadle.planner.space import Candidate, candidates

SAMPLE = 1_000


def _even(points: list[Candidate], count: int) -> list[Candidate]:
    step = max(1.0, len(points) / count)
    return [points[int(place * step)] for place in range(min(count, len(points)))]


def _timed(points: list[Candidate], limit: int, *, bounded: bool) -> tuple[SearchResult, float]:
    begin = time.process_time()
    found = search(points, limit, bounded=bounded)
    return found, time.process_time() - begin


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="deepseek-v3")
    parser.add_argument("--cluster", default="h800:2048")
    asked = parser.parse_args()
    model, cluster = load_model(asked.model), load_cluster(asked.cluster)
    limit = usable_bytes(cluster)
    begin = time.process_time()
    space = SearchSpace(micro_batch_size=(1,), balanced=(True,))
    points = list(candidates(model, cluster, space, global_batch_size=8 * cluster.num_gpus, seq_len=4096))
    listed = time.process_time() - begin
    print(f"{len(points):,} candidates listed in {listed:.1f} s")
    _timed(points[: len(points) // 50], 1 << 60, bounded=True)  # numba compiles, or reads what it compiled before
    found, taken = _timed(points, limit, bounded=True)
    print(f"{len(points):,} in {taken:.1f} s of CPU, {found.num_simulated} simulated: {describe(found.best.job)}")
    few = _even(points, SAMPLE)
    (bounded, with_bounds), (every, without) = (_timed(few, limit, bounded=each) for each in (True, False))
    same = bounded.best == every.best and bounded.front == every.front
    print(f"{SAMPLE:,} in {with_bounds:.1f} s with bounds, {without:.1f} s without; the same best and front: {same}")
    result = {
        "candidates": len(points),
        "cpu_s": round(taken, 1),
        "simulated": found.num_simulated,
        "fitting": len(found.fitting),
        "sample": SAMPLE,
        "sample_cpu_s": round(with_bounds, 1),
        "sample_cpu_s_unbounded": round(without, 1),
        "same": same,
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
