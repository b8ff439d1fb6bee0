"""How often `treadle hang` names the rank that stopped: `python benchmarks/hang_stops.py [NAME ...] [--whole]`.

A step of each schedule is run until nothing moves, with one rank never in one of its cells: every rank, every cell.
Sends end when their receive is posted, or at once (small messages). The dumps are read as `treadle hang` reads them.
`right` names the rank that stopped alone, `not to be told apart` it and another, `open` no rank (all messages that were
launched have ended); `wrong` is the rest. Each size replaces its row in rates/hang_stops.csv, and the table in
docs/hung.md. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from rates.table import HANG
from tests.support.stopped_dumps import SIZES, stops, verdict
from treadle.schedules import SCHEDULES, generate


def main() -> None:
    """Stop every rank at every cell, and print how often it is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedules", nargs="*", default=list(SCHEDULES))
    parser.add_argument("--whole", action="store_true", help="the larger sizes, too")
    args = parser.parse_args()
    total: Counter[str] = Counter()
    for name in args.schedules:
        for pp, vpp, num_mb in SIZES[name] if args.whole else SIZES[name][:1]:
            schedule = generate(name, pp=pp, vpp=vpp, microbatches=num_mb)
            counts: Counter[str] = Counter()
            for stop in stops(schedule):
                with tempfile.TemporaryDirectory() as directory:
                    found, sentence = verdict(schedule, stop, Path(directory))
                counts[found] += 1
                if found == "wrong":
                    print(f"wrong: {name} {stop}: {sentence}", flush=True)
            size = f"PP{pp} V{schedule.placement.vpp} M{num_mb}"
            HANG.write({(name, size): counts})
            print(f"{name} {size}: " + ", ".join(f"{counts[each]} {each}" for each in HANG.verdicts), flush=True)
            total += counts
    print(json.dumps({"stops": total.total(), **{name: total[name] for name in HANG.verdicts}}))


if __name__ == "__main__":
    main()
