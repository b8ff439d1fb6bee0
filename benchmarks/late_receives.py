"""Seconds that `--receives late` takes for each schedule that torch's CSV can carry.

    python benchmarks/late_receives.py [--pp 16] [-m 128]

The first time of a fresh install includes compiling the search. The last line is JSON: the seconds by schedule.
"""

from __future__ import annotations

import argparse
import json
import time

import treadle
from treadle.passes.cells import lower_cells
from treadle.passes.late_receives import late_receives
from treadle.passes.torch_turns import torch_turns
from treadle.schedules import SCHEDULES


def main() -> None:
    """Times the placement of receives, and the whole text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pp", type=int, default=16)
    parser.add_argument("-m", "--microbatches", type=int, default=128)
    args = parser.parse_args()
    found = {}
    print(f"{'schedule':20}{'messages':>10}{'placement s':>14}{'text s':>10}")
    for name in sorted(set(SCHEDULES) - {"dualpipe"}):
        schedule = treadle.generate(name, pp=args.pp, microbatches=args.microbatches)
        program = lower_cells(schedule)
        begin = time.perf_counter()
        turns = torch_turns(program)
        assert turns is not None
        late_receives(program, turns)
        placed = time.perf_counter()
        text = treadle.dumps(schedule, "torch-comms", receives="late")
        end = time.perf_counter()
        found[name] = {"placement_s": round(placed - begin, 3), "text_s": round(end - placed, 3)}
        print(f"{name:20}{text.count('RECV'):10}{placed - begin:14.2f}{end - placed:10.2f}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
