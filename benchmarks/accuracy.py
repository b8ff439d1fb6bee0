"""How far what `treadle plan` prints is from published runs: `python benchmarks/accuracy.py`.

Steps and memory are those of the command, with the presets that are shipped (`benchmarks/held_to/printed.py` says of
which runs, and what they were fitted on); rows with their sources are in `benchmarks/held_to/data`. Printed are, for
each data set, the median, 90th percentile and maximum of the absolute errors and the median with its sign (below 0:
the plan is too fast); how many pairs of configurations are ranked right; how many runs a plan refuses for their memory;
and every row that is off by more than 15 %. It takes minutes.

The last line is JSON; figures are in percent.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from held_to import printed
from held_to.rows import Prediction, misses_of, spread


def report() -> dict[str, dict[str, float]]:
    """Print how far plans are off, and return it."""
    found: dict[str, dict[str, float]] = {}
    print("data set          rows  median    p90    max   bias")
    for name, rows in printed.data_sets().items():
        start = time.process_time()
        own = found[name] = printed.figures(rows)
        shown = "".join(f"{own[key]:7.1f}" for key in ("median", "p90", "max", "bias"))
        print(f"{name:17} {own['rows']:4.0f} {shown}   ({time.process_time() - start:.0f} s)", flush=True)
        _print_gpus(name, rows)
    memory = spread(printed.memory_predictions())
    found["simumax_memory"] = {key: 100 * memory[key] for key in ("median", "p90", "max")}
    print(f"simumax_memory    {len(printed.memory_predictions()):4} ", end="")
    print("".join(f"{found['simumax_memory'][key]:7.1f}" for key in ("median", "p90", "max")))
    found |= _print_ranked() | _print_refused()
    _print_misses([row.prediction for rows in printed.data_sets().values() for row in rows])
    return found


def _print_gpus(name: str, rows: tuple[printed.Row, ...]) -> None:
    gpus = dict.fromkeys(row.job.cluster.gpu for row in rows)
    if len(gpus) > 1:
        own = {gpu: printed.figures([row for row in rows if row.job.cluster.gpu == gpu]) for gpu in gpus}
        told = ", ".join(f"{gpu} {each['median']:.1f} ({each['rows']:.0f})" for gpu, each in own.items())
        print(f"    median by GPU (rows): {told}")


def _print_ranked() -> dict[str, dict[str, float]]:
    sets = printed.data_sets()
    found: dict[str, dict[str, float]] = {}
    for name, rows in {
        "bridge_ranked": [row for part in ("bridge_dense", "bridge_dense_25", "bridge_moe") for row in sets[part]],
        "vtrain_ranked": sets["vtrain"],
    }.items():
        right, total = printed.ranked(rows, printed.same_machine)
        found[name] = {"right": right, "pairs": total}
        print(f"{name}: {right} of {total} pairs that were measured more than 5 % apart")
    return found


def _print_refused() -> dict[str, dict[str, float]]:
    sets = printed.data_sets()
    rows = [row for name in ("bridge_dense", "bridge_dense_25", "bridge_moe", "mlperf") for row in sets[name]]
    refused = sum(not row.fits for row in rows)
    print(f"refused for their memory, although they ran: {refused} of {len(rows)}")
    return {"refused": {"rows": refused, "of": len(rows)}}


def _print_misses(predictions: list[Prediction]) -> None:
    for miss in misses_of(predictions):
        print(f"    off by {100 * miss.error:+.1f} %: {miss.row}")


def main() -> None:
    """Print the figures."""
    found = {name: {key: round(value, 2) for key, value in own.items()} for name, own in report().items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
