"""How often `treadle why` names an injected cause: `python benchmarks/why_causes.py [--sizes 4x1 ...] [--forms ...]`.

Each run of the grid has one cause, at a random place and of a random size, and is written in the form of a trainer.
Seeds are those that were held out when thresholds were set; `--seeds 0 1` are those that they were set on. The cause
that is named is right, one of several that the sentence says cannot be told apart, small (none is named, and the
injected one costs under 6 % of a step), missed (none, several, the files refused), or wrong. Held-out runs replace
their rows in rates/why_causes.csv, and the table in docs/your_run.md. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from rates.table import WHY
from tests.support.injected_causes import CAUSES, FORMS, HELD_OUT, SIZES, Run, held_out, verdict


def runs(pp: int, dp: int, form: str, seed: int) -> Iterator[Run]:
    """Yield the runs of a size, a form and a seed."""
    made = held_out if seed in HELD_OUT else _tuned
    for vpp in (1, 2):
        for cause in CAUSES:
            yield made(cause, form, (pp, dp, vpp), seed)


def _tuned(cause: str, form: str, sizes: tuple[int, int, int], seed: int) -> Run:
    return Run(cause, form, *sizes, seed)


def main() -> None:
    """Run the grid and print its rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=list(HELD_OUT))
    parser.add_argument("--sizes", nargs="*", default=[f"{pp}x{dp}" for pp, dp in SIZES], help="ranks x replicas")
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=FORMS)
    args = parser.parse_args()
    sizes = [(int(pp), int(dp)) for pp, dp in (size.split("x") for size in args.sizes)]
    by_cause: dict[str, Counter[str]] = defaultdict(Counter)
    for seed, (pp, dp), form in itertools.product(args.seeds, sizes, args.forms):
        if form == "Primus" and dp > 1:  # it writes the first replica only
            continue
        counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for run in runs(pp, dp, form, seed):
            with tempfile.TemporaryDirectory() as directory:
                found, sentence = verdict(run, Path(directory))
            counts[run.cause, f"{form} PP{pp} DP{dp} seed {seed}"][found] += 1
            by_cause[run.cause][found] += 1
            if found in ("wrong", "missed"):
                print(f"{found}: {run.name} at {run.at}: {sentence}", flush=True)
        if seed in HELD_OUT:
            WHY.write(counts)
    for cause, found_of in by_cause.items():
        print(f"{cause:28}" + "".join(f"{found_of[name]:6} {name}" for name in WHY.verdicts if found_of[name]))
    total = sum(by_cause.values(), Counter())
    print(json.dumps({"runs": total.total(), **{name: total[name] for name in WHY.verdicts}}))


if __name__ == "__main__":
    main()
