"""How near estimates come to published measurements: `python benchmarks/accuracy.py`.

Each data set is a module of `benchmarks/held_to`: its docstring says which rows constants are fitted on and which are
predicted; its rows with their sources are in `benchmarks/held_to/data`. Printed are the figures beside what they are
held to, the distributions behind them, and every row that is off by more than 15 % with its cause.

`--fit` prints the constants of GPUs instead, fitted on all of Megatron-Bridge's rows: [efficiency] of the presets.

The last line is JSON; figures are in percent.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parent))

MODULES = ("mlperf", "bridge", "simumax_memory", "simumax_time", "zero_bubble", "vtrain")

BARS: dict[str, float] = {
    "mlperf_max": 2.0,
    "mlperf_blind_median": 5.0,
    "bridge_release_dense_median": 3.0,
    "bridge_release_moe_median": 5.0,
    "bridge_config_dense_median": 6.0,
    "bridge_config_moe_median": 8.0,
    "bridge_rank": 85.0,
    "kimi_k2_max": 5.0,
    "simumax_memory_median": 1.0,
    "simumax_memory_max": 3.0,
    "simumax_time_median": 3.5,
    "zb_mape": 1.0,
    "vtrain_median": 5.0,
}
"""What each figure is held to, in percent: at most, and at least for `bridge_rank`."""

FITTED_GPUS = ("h100", "b200", "b300", "gb200", "gb300")


def reached(name: str, figure: float) -> bool:
    """Return whether a figure keeps its bar."""
    return figure >= BARS[name] if name == "bridge_rank" else figure <= BARS[name]


def modules() -> list[ModuleType]:
    """Return the data sets that are there."""
    return [import_module(f"held_to.{name}") for name in MODULES if find_spec(f"held_to.{name}")]


def figures(module: ModuleType) -> dict[str, float]:
    """Return the figures of a data set that have a bar."""
    return {name: float(value) for name, value in module.run().items() if name in BARS}


def report() -> dict[str, float]:
    """Print all data sets and return their figures."""
    found: dict[str, float] = {}
    for module in modules():
        start = time.perf_counter()
        own = figures(module)
        found |= own
        print(f"{module.__name__}  ({time.perf_counter() - start:.0f} s)")
        for name, figure in own.items():
            sign = ">=" if name == "bridge_rank" else "<="
            print(
                f"  {name:30} {figure:7.2f}   {sign} {BARS[name]:<4} {'' if reached(name, figure) else 'NOT REACHED'}"
            )
        for name, values in getattr(module, "distributions", dict)().items():
            shown = ", ".join(f"{key} {100 * value:.1f} %" for key, value in values.items())
            print(f"    {name}: {shown}")
        for miss in module.misses():
            print(f"    off by {100 * miss.error:+.1f} %: {miss.row}: {miss.cause}")
    return found


def fit() -> dict[str, dict[str, float]]:
    """Print and return the constants of each GPU, fitted on all rows of Megatron-Bridge."""
    from held_to.bridge import runs
    from treadle.estimate.calibration import Calibration

    calibration, found = Calibration.fit(runs()), {}
    for gpu in FITTED_GPUS:
        precisions = sorted({run.job.precision for run in runs() if run.gpu.removeprefix("g") == gpu.removeprefix("g")})
        found[gpu] = {name: round(value, 3) for name, value in calibration.efficiency(gpu, precisions).items()}
        print(f"# {gpu}\n[efficiency]")
        print("\n".join(f"{name} = {value}" for name, value in found[gpu].items()))
    return found


def main() -> None:
    """Print the figures, or the constants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="print constants fitted on all rows instead")
    print(json.dumps(fit() if parser.parse_args().fit else {k: round(v, 3) for k, v in report().items()}))


if __name__ == "__main__":
    main()
