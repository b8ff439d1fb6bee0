"""Orders found by the solver against the best of ours: `python benchmarks/synthesize.py [seconds a row]`.

F, I, W of 18, 18, 9 and messages of 1, as in the zero-bubble paper's tables (arXiv 2401.10241), rounded.
1. P4 M8 with room for 4 and 3 micro-batches on a rank, and without a limit: all proven.
2. P8 M32 with one stage 20 % slower and room for 8: the gain over the best schedule of ours, and the gap that is left.
3. P8 M128, past what is solved at once: a good middle repeated.

A row a step; the last line is JSON. The rows of 1 are the same in every run. Those of 2 and 3 depend on the machine's
speed, as the search ends by the clock.
"""

from __future__ import annotations

import json
import sys

from treadle.costs import Costs, parse
from treadle.synthesize import MemoryLimits, SolverOptions, synthesize_schedule

STEPS = {
    "p4_m8_room4": (4, 8, 4, None),
    "p4_m8_room3": (4, 8, 3, None),
    "p4_m8": (4, 8, None, None),
    "p8_m32_slow0": (8, 32, 8, 0),
    "p8_m32_slow3": (8, 32, 8, 3),
    "p8_m32_slow7": (8, 32, 8, 7),
    "p8_m128_slow3": (8, 128, 8, 3),
}
"""Ranks, micro-batches, activations a rank may hold, the stage that is 20 % slower."""


def costs(slow: int | None) -> Costs:
    """Costs of cells, one stage slower."""
    text = 'name = "18/18/9"\nunit = "unit"\n[cells]\nf = 18\ni = 18\nw = 9\n[message]\nsend = 1\n'
    return parse(text + (f"[stage.{slow}]\nfactor = 1.2\n" if slow is not None else ""))


def main(seconds: float) -> None:
    """Run all steps."""
    results: dict[str, object] = {"seconds": seconds}
    for name, (pp, microbatches, room, slow) in STEPS.items():
        found = synthesize_schedule(
            pp=pp,
            microbatches=microbatches,
            costs=costs(slow),
            limits=MemoryLimits(max_activations=room),
            solver=SolverOptions(time_limit_s=seconds),
        ).as_dict()
        kept = ("makespan", "lower_bound", "gap", "proven", "source", "best_of_ours", "best_of_ours_makespan", "gain")
        results[name] = {key: found[key] for key in kept}
        ours = f"{found['best_of_ours']} {found['best_of_ours_makespan']}"
        gain = f", {found['gain']:.2%} less" if found["gain"] is not None else ""
        standing = "proven" if found["proven"] else f"at least {found['lower_bound']}, gap {found['gap']:.2%}"
        print(f"{name}: {found['makespan']} ({standing}) by {found['source']}; ours {ours}{gain}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
