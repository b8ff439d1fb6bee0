"""Fit the constants of GPU presets to published runs: `python benchmarks/fit_presets.py`.

Writes the [efficiency] sections of src/treadle/estimate/presets/clusters and, from runs that were left out of a fit,
src/treadle/estimate/presets/run_errors.toml; `--errors` writes the latter alone. `benchmarks/held_to/fitting.py`
describes the fit; it takes minutes. The last line is JSON: the runs, and the factors of older releases.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from held_to.fitting import ConstantPool, Floats, plain_cluster
from held_to.left_out import fitted_rows
from held_to.printed import Row, data_sets, same_machine
from held_to.typed_left_out import LeftOut, left_out_rows, write_left_out
from treadle.calibrate.constants_of_job import constants_of, with_constants
from treadle.calibrate.fit import fit_paths
from treadle.calibrate.path_form import PathForm, constants_at
from treadle.estimate import load_cluster

PRESETS = Path(__file__).parents[1] / "src" / "treadle" / "estimate" / "presets"
UNMEASURED = {"h800": "h100", "h20": "h100", "a100": "h100"}
"""GPUs without runs in the fit, and the one whose constants they take; a100's are fitted to runs of its own then."""

_SOURCE = (
    "# Fitted to {runs} published runs, Megatron-Bridge 25.09 to 26.08 and SimuMax on B200, as of the newest release."
)


def write_clusters(pool: ConstantPool, logs: Floats) -> None:
    """Write the [efficiency] of each preset."""
    for path in sorted((PRESETS / "clusters").glob("*.toml")):
        gpu = UNMEASURED.get(path.stem, path.stem)
        text = path.read_text(encoding="utf-8")
        peaks = text[text.index("[peak_flops]") :]
        kept = text.partition("[efficiency]")[0].rstrip().splitlines()
        while kept[-1].startswith("#") or not kept[-1]:
            kept.pop()
        lines, constants = [_SOURCE.format(runs=len(pool.runs))], pool.constants(gpu, logs)
        if path.stem == "a100":
            lines.append("# They are those of h100, fitted to 24 runs of the zero-bubble paper, arXiv 2401.10241.")
            constants = fitted_to_zero_bubble(constants)
        elif gpu != path.stem:
            lines.append(f"# They are those of {gpu}: no run of this GPU is among them.")
        lines.append("[efficiency]")
        for key, value in constants.items():
            precision = key.rpartition("_")[2]
            if precision not in ("fp8", "mxfp8", "nvfp4") or _has(peaks, precision):
                lines.append(f"{key} = {float(f'{value:.4g}'):g}")
        path.write_text("\n".join([*kept, "", *lines, ""]), encoding="utf-8")


def fitted_to_zero_bubble(constants: Mapping[str, float]) -> Mapping[str, float]:
    """Return constants as `treadle calibrate` moves them for the zero-bubble paper's runs of 1F1B and interleaved."""
    rows = [*data_sets()["zb_1f1b"], *data_sets()["zb_interleaved"]]
    cluster = with_constants(plain_cluster(load_cluster("a100:64")), constants)
    jobs = [replace(row.job, cluster=replace(cluster, num_gpus=row.job.cluster.num_gpus)) for row in rows]
    keys = sorted({key for job in jobs for key in constants_of(job)})
    forms = {job: PathForm.of(job, keys) for job in jobs}
    logs = fit_paths([forms[job] for job in jobs], [row.seconds for row in rows], cluster).logs
    return {**constants, **constants_at(cluster, keys, logs)}


def _has(peaks: str, precision: str) -> bool:
    return f"\n{precision} =" in peaks


def write_errors(pool: ConstantPool) -> None:
    """Write the errors of typed commands whose runs were left out of the fit, by GPU, kind of model and CUDA graphs.

    A command prints a step of the newest release, so no factor of a release counts.
    """
    write_left_out(pool)
    pairs = pair_errors(pool.runs)
    write_run_errors(f"{statistics.median(pairs):.4f}  # of {len(pairs)} pairs, with the presets as shipped")


def write_run_errors(pair_error: str) -> None:
    """Write run_errors.toml from the rows of data/typed_left_out.csv."""
    found: dict[tuple[str, bool, str], list[LeftOut]] = {}
    for row in left_out_rows():
        found.setdefault((row.gpu, row.kind == "MoE", row.graphs), []).append(row)
    lines = [
        "# Printed over measured step, less 1, of typed commands of published runs that the constants were not fitted",
        "# to: their configuration left out of the fit, or their chip. Written by `python benchmarks/fit_presets.py`.",
    ]
    lines += ["", f"pair_error = {pair_error}"]
    for (gpu, moe, graphs), rows in sorted(found.items()):
        lines += ["", "[[runs]]", f'gpu = "{gpu}"', f"moe = {str(moe).lower()}", f'graphs = "{graphs}"']
        lines.append(f"configurations = {len({row.configuration for row in rows})}")
        for name in ("configuration_left_out", "chip_left_out"):
            lines += _wrapped(name, sorted(round(getattr(row, name).error, 3) for row in rows))
    (PRESETS / "run_errors.toml").write_text("\n".join([*lines, ""]), encoding="utf-8")


def pair_errors(runs: Iterable[Row]) -> list[float]:
    """Return how far the ratio of two printed steps is off, for pairs of configurations on the same GPUs.

    Of Megatron-Bridge's runs those of one release are compared: software changes between two.
    """
    found = [(row, math.log(row.prediction.predicted / row.seconds)) for row in runs]
    return [
        abs(one - two)
        for (row, one), (other, two) in combinations(found, 2)
        if row.job != other.job and row.release == other.release and same_machine(row) == same_machine(other)
    ]


def _wrapped(name: str, errors: list[float], each: int = 14) -> list[str]:
    rows = [", ".join(f"{error:g}" for error in errors[at : at + each]) for at in range(0, len(errors), each)]
    return [f"{name} = [", *(f"  {row}," for row in rows), "]"]


def main() -> None:
    """Fit, write, and print the factors of releases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--errors", action="store_true", help="Write run_errors.toml alone; presets stay.")
    errors, pool = parser.parse_args().errors, ConstantPool(fitted_rows())
    logs = pool.fit_all()
    if not errors:
        write_clusters(pool, logs)
    write_errors(pool)
    first = len(pool.gpus) * len(pool.keys)
    factors = {name: round(math.exp(log), 3) for name, log in zip(pool.factors, logs[first:], strict=True)}
    print(json.dumps({"runs": len(pool.runs), "releases": factors}))


if __name__ == "__main__":
    main()
