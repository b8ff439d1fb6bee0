"""How far what `treadle plan` prints is from published runs: `python benchmarks/accuracy.py`.

Steps and memory are those of the command, with the presets that are shipped (`benchmarks/held_to/printed.py` says of
which runs, and what they were fitted on); rows with their sources are in `benchmarks/held_to/data`. Printed are, for
each data set, the median, 90th percentile and maximum of the absolute errors and the median with its sign (below 0:
the plan is too fast); how many pairs of configurations are ranked right; how many runs a plan refuses for their memory;
and every row that is off by more than 15 %. It takes minutes.

`--fit` prints the constants of GPUs instead, fitted on all of Megatron-Bridge's rows ([efficiency] of the presets), and
how far the closed form that they are fitted with carries over to rows that it was not fitted on. A plan does not print
that form's estimates.

The last line is JSON; figures are in percent.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parent))

from held_to import bridge, mlperf, printed
from held_to.rows import Prediction, misses_of, spread

BARS: dict[str, float] = {
    "mlperf_blind_median": 5.0,
    "bridge_release_dense_median": 3.0,
    "bridge_release_moe_median": 5.0,
    "bridge_config_dense_median": 6.0,
    "bridge_config_moe_median": 8.0,
    "bridge_rank": 85.0,
    "kimi_k2_max": 5.0,
}
"""What each figure of the closed form is held to, in percent: at most, and at least for `bridge_rank`."""

FITTED_GPUS = ("h100", "b200", "b300", "gb200", "gb300")


def reached(name: str, figure: float) -> bool:
    """Return whether a figure of the closed form keeps its bar."""
    return figure >= BARS[name] if name == "bridge_rank" else figure <= BARS[name]


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
    for miss in misses_of(predictions, lambda _: ""):
        print(f"    off by {100 * miss.error:+.1f} %: {miss.row}")


def carry_over() -> dict[str, float]:
    """Print how far the closed form is off on rows that it was not fitted on, and return the figures."""
    found: dict[str, float] = {}
    for module in (mlperf, bridge):
        own = closed_form_figures(module)
        found |= own
        for name, figure in own.items():
            sign = ">=" if name == "bridge_rank" else "<="
            missed = "" if reached(name, figure) else "NOT REACHED"
            print(f"# {name:30} {figure:7.2f}   {sign} {BARS[name]:<4} {missed}")
        for name, values in module.distributions().items():
            shown = ", ".join(f"{key} {100 * value:.1f} %" for key, value in values.items())
            print(f"#   {name}: {shown}")
        for miss in module.misses():
            print(f"#   off by {100 * miss.error:+.1f} %: {miss.row}: {miss.cause}")
    return found


def closed_form_figures(module: ModuleType) -> dict[str, float]:
    """Return the figures of a data set that have a bar."""
    return {name: float(value) for name, value in module.run().items() if name in BARS}


def fit() -> dict[str, dict[str, float]]:
    """Print and return the constants of each GPU, fitted on all rows of Megatron-Bridge."""
    from treadle.estimate.calibration import Calibration

    calibration, found = Calibration.fit(bridge.runs()), {}
    for gpu in FITTED_GPUS:
        precisions = sorted(
            {run.job.precision for run in bridge.runs() if run.gpu.removeprefix("g") == gpu.removeprefix("g")}
        )
        found[gpu] = {name: round(value, 3) for name, value in calibration.efficiency(gpu, precisions).items()}
        print(f"# {gpu}\n[efficiency]")
        print("\n".join(f"{name} = {value}" for name, value in found[gpu].items()))
    return found


def main() -> None:
    """Print the figures, or the constants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="print constants fitted on all rows instead")
    if parser.parse_args().fit:
        print(json.dumps({"constants": fit(), "carry_over": {k: round(v, 3) for k, v in carry_over().items()}}))
        return
    found = {name: {key: round(value, 2) for key, value in own.items()} for name, own in report().items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
