"""How often `treadle why` names an injected cause: `python benchmarks/why_causes.py [--seeds 1] [--sizes 4x1 ...]`.

Each run of the grid has one cause, at a random place, and is written in the form of a trainer. The cause that is named
is right, one of several that the sentence says cannot be told apart, missed (none, several, the files refused), or
wrong. The last line is JSON.
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

from tests.support.injected_causes import CAUSES, FORMS, SIZES, Run, verdict


def runs(sizes: list[tuple[int, int]], seeds: int) -> Iterator[Run]:
    """Yield the grid; Primus writes the first replica only, so its runs have one."""
    for seed in range(seeds):
        for pp, dp in sizes:
            for form in FORMS:
                for vpp in (1, 2):
                    for cause in CAUSES:
                        if form != "Primus" or dp == 1:
                            yield Run(cause, form, pp, dp, vpp, seed)


def main() -> None:
    """Run the grid and print its rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--sizes", nargs="*", default=[f"{pp}x{dp}" for pp, dp in SIZES], help="ranks x replicas")
    args = parser.parse_args()
    sizes = [(int(pp), int(dp)) for pp, dp in (size.split("x") for size in args.sizes)]
    by_cause: dict[str, Counter[str]] = defaultdict(Counter)
    for run in runs(sizes, args.seeds):
        with tempfile.TemporaryDirectory() as directory:
            found, sentence = verdict(run, Path(directory))
        by_cause[run.cause][found] += 1
        if found in ("wrong", "missed"):
            print(f"{found}: {run.name} at {run.at}: {sentence}", flush=True)
    names = ("right", "not to be told apart", "missed", "wrong")
    print(f"{'injected':28}" + "".join(f"{name:>22}" for name in names))
    for cause, counts in by_cause.items():
        print(f"{cause:28}" + "".join(f"{counts[name]:22}" for name in names))
    total = sum(by_cause.values(), Counter())
    num = sum(total.values())
    print(f"{'all':28}" + "".join(f"{total[name] / num:22.1%}" for name in names))
    print(json.dumps({"runs": num, **{name: total[name] for name in names}}))


if __name__ == "__main__":
    main()
