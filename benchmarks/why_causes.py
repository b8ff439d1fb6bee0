"""How often `treadle why` names an injected cause: `python benchmarks/why_causes.py [--sizes 4x1 ...] [--forms ...]`.

Each run of the grid has one cause, at a random place and of a random size, and is written in the form of a trainer.
Seeds are those that were held out when thresholds were set; `--seeds 0 1` are those that they were set on. The cause
that is named is right, one of several that the sentence says cannot be told apart, small (none is named, and the
injected one costs under 6 % of a step), missed (none, several, the files refused), or wrong. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.injected_causes import CAUSES, FORMS, HELD_OUT, SIZES, Run, held_out, verdict

NAMES = ("right", "not to be told apart", "small", "missed", "wrong")


def runs(sizes: list[tuple[int, int]], forms: list[str], seeds: list[int]) -> Iterator[Run]:
    """Yield the grid; Primus writes the first replica only, so its runs have one."""
    for seed in seeds:
        for pp, dp in sizes:
            for form in forms:
                for vpp in (1, 2):
                    for cause in CAUSES:
                        if form != "Primus" or dp == 1:
                            made = held_out if seed in HELD_OUT else _tuned
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
    for run in runs(sizes, args.forms, args.seeds):
        with tempfile.TemporaryDirectory() as directory:
            found, sentence = verdict(run, Path(directory))
        by_cause[run.cause][found] += 1
        if found in ("wrong", "missed"):
            print(f"{found}: {run.name} at {run.at}: {sentence}", flush=True)
    print("".join(f"| {name} " for name in ("injected", *NAMES)) + "|\n|---|" + "---|" * len(NAMES))
    for cause, counts in by_cause.items():
        print(f"| {cause} | " + " | ".join(str(counts[name]) for name in NAMES) + " |")
    total = sum(by_cause.values(), Counter())
    num = sum(total.values())
    print(f"| all {num} | " + " | ".join(f"{total[name] / num:.1%}" for name in NAMES) + " |")
    print(json.dumps({"runs": num, **{name: total[name] for name in NAMES}}))


if __name__ == "__main__":
    main()
