"""How far the step that `treadle plan` prints is from published runs: `python benchmarks/accuracy.py`.

Rows with their sources are in `benchmarks/held_to/data`. Every figure is of the printed step.

- In sample: with the presets that are shipped, which `benchmarks/fit_presets.py` fitted to Megatron-Bridge and SimuMax.
  They are of the newest release; a run of an older one counts with the factor of its release. `printed` has no factor.
- Left out: with constants fitted to the other runs: without the configuration (a model on its GPUs, cut in one way),
  the release, the chip, SimuMax, Kimi K2. A release that is left out has no factor.
- Blind: MLPerf, vTrain and runs with FSDP, most of which offload too, are in no fit. The constants of A100 are fitted
  to the zero-bubble paper.

Then: pairs of configurations of one model, GPU, number of GPUs and precision that are ranked right; the regret of the
configuration that is ranked first; runs that a plan refuses for their memory; every row off by more than 15 % with its
cause. It takes minutes. The last line is JSON; figures are in percent. `--markdown` prints the table of docs/plan.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from held_to import left_out, printed
from held_to.fitting import ConstantPool
from held_to.misses import cause_of
from held_to.rows import OFF, Prediction, spread

Pairs = Sequence[tuple[printed.Row, Prediction]]

BARS = {
    "in_sample_dense_median": 2, "in_sample_dense_p90": 6, "in_sample_moe_median": 4, "in_sample_moe_p90": 10,
    "config_dense_median": 4, "config_moe_median": 6, "config_moe_p90": 16,
    "release_dense_median": 3, "release_moe_median": 6, "release_moe_p90": 15,
    "mlperf_blind_median": 5, "mlperf_blind_max": 9, "config_simumax_median": 4, "kimi_max": 10,
    "refused": 12, "regret_max": 6, "memory_median": 1, "memory_max": 3,
}  # fmt: skip
"""What the figures are at most."""
LEAST = {"rank_same_precision": 98, "rank_vtrain": 85}
"""What they are at least."""


class Report:
    """Figures under their names, printed as they are found."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self.rows: list[tuple[str, str, int, dict[str, float]]] = []
        self.misses: list[tuple[str, printed.Row, Prediction]] = []

    def errors(self, key: str, what: str, kind: str, pairs: Pairs) -> None:
        """Add median, 90th percentile and maximum of the errors of some runs."""
        own = {name: 100 * value for name, value in spread([each for _, each in pairs]).items()}
        own["bias"] = 100 * statistics.median(each.error for _, each in pairs)
        for name in ("median", "p90", "max", "bias"):
            self.figures[f"{key}_{name}"] = own[name]
        self.rows.append((what, kind, len(pairs), own))
        if not key.startswith(("chip", "simumax_blind")):  # a GPU that nobody measured is off by more
            self.misses += [(what, row, each) for row, each in pairs if abs(each.error) > OFF]
        shown = "".join(f"{own[name]:7.1f}" for name in ("median", "p90", "max", "bias"))
        print(f"{what:32} {kind:8} {len(pairs):4} {shown}", flush=True)

    def kinds(self, key: str, what: str, pairs: Pairs) -> None:
        """Add the errors of Megatron-Bridge's dense and MoE runs, and of SimuMax's, each by themselves."""
        kinds: dict[str, Callable[[printed.Row], bool]] = {
            "dense": lambda row: bool(row.release) and row.kind == "dense",
            "moe": lambda row: bool(row.release) and row.kind == "MoE",
            "simumax": lambda row: not row.release,
        }
        for kind, is_of in kinds.items():
            own = [pair for pair in pairs if is_of(pair[0])]
            if own:
                self.errors(f"{key}_{kind}", what, {"moe": "MoE", "simumax": "SimuMax"}.get(kind, kind), own)

    def add(self, key: str, value: float, text: str) -> None:
        """Add one figure."""
        self.figures[key] = value
        print(text, flush=True)


def measure() -> Report:
    """Print all figures."""
    report, sets = Report(), printed.data_sets()
    print(f"{'protocol':32} {'runs':13}  median    p90    max   bias")
    pool = ConstantPool(left_out.fitted_rows())
    logs = pool.fit_all()
    plain = [(row, row.prediction) for row in pool.runs]
    aged = [(row, Prediction(row.name, pool.aged(row, logs) * each.predicted, row.seconds)) for row, each in plain]
    report.kinds("in_sample", "in sample", aged)
    report.kinds("printed", "in sample, release not counted", plain)
    report.kinds("config", "configuration left out", list(left_out.predictions(pool, left_out.by_configuration)))
    report.kinds("release", "release left out", list(left_out.predictions(pool, left_out.by_release, aged=False)))
    report.kinds("chip", "chip left out", list(left_out.predictions(pool, left_out.by_chip)))
    report.errors("kimi", "Kimi K2 left out", "MoE", list(left_out.predictions(pool, left_out.by_kimi)))
    report.errors("simumax_blind", "SimuMax left out", "SimuMax", list(left_out.predictions(pool, left_out.by_simumax)))
    for key, what, name in (
        ("fsdp_blind", "FSDP, blind", "bridge_fsdp"),
        ("mlperf_blind", "MLPerf 405B, blind", "mlperf"),
        ("zero_bubble_1f1b", "zero-bubble paper, 1F1B", "zb_1f1b"),
        ("zero_bubble_interleaved", "zero-bubble paper, interleaved", "zb_interleaved"),
        ("vtrain", "vTrain, blind", "vtrain"),
    ):
        report.errors(key, what, "dense", [(row, row.prediction) for row in sets[name]])
    memory = spread(printed.memory_predictions())
    for name in ("median", "p90", "max"):
        report.figures[f"memory_{name}"] = 100 * memory[name]
    print("SimuMax's memory: " + ", ".join(f"{name} {100 * memory[name]:.1f}" for name in ("median", "p90", "max")))
    _rank(report)
    _refused(report)
    return report


def _rank(report: Report) -> None:
    sets = printed.data_sets()
    bridge = [row for part in ("bridge_dense", "bridge_dense_25", "bridge_moe") for row in sets[part]]
    for key, rows in {"rank_same_precision": bridge, "rank_vtrain": sets["vtrain"]}.items():
        right, total = printed.ranked(rows, printed.same_machine)
        report.add(key, 100 * right / total, f"{key}: {right} of {total} pairs measured more than 5 % apart")
    regrets = printed.regrets([*bridge, *sets["simumax"], *sets["zb_1f1b"], *sets["vtrain"]])
    for name, regret in sorted(regrets.items(), key=lambda each: -each[1])[:3]:
        print(f"    regret of the configuration ranked first: {100 * regret:.1f} % {name}")
    report.add(
        "regret_max", 100 * max(regrets.values()), f"regret_max: {100 * max(regrets.values()):.1f} of {len(regrets)}"
    )


def _refused(report: Report) -> None:
    sets = printed.data_sets()
    rows = [row for name in ("bridge_dense", "bridge_dense_25", "bridge_moe", "mlperf") for row in sets[name]]
    refused = [row for row in rows if not row.fits]
    report.add("refused", len(refused), f"refused for their memory, although they ran: {len(refused)} of {len(rows)}")
    for row in refused:
        print(f"    refused: {row.name}")


def markdown(report: Report) -> Iterable[str]:
    """Yield the table of docs/plan.md."""
    yield "| protocol | runs | rows | median | 90th percentile | at most | bias |"
    yield "|---|---|---|---|---|---|---|"
    for what, kind, count, own in report.rows:
        cells = " | ".join(f"{own[name]:.1f}" for name in ("median", "p90", "max", "bias"))
        yield f"| {what} | {kind} | {count} | {cells} |"


def main() -> None:
    """Print the figures, what is beyond its bar, and the rows that are far off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true")
    wanted = parser.parse_args()
    report = measure()
    for what, row, each in sorted(report.misses, key=lambda miss: -abs(miss[2].error)):
        if row.job.cluster.gpu != "a100":
            print(f"    off by {100 * each.error:+.1f} % ({what}): {row.name}: {cause_of(row)}")
    far = sum(row.job.cluster.gpu == "a100" for _, row, _ in report.misses)
    print(f"    and {far} rows of A100")
    beyond = [key for key, bar in BARS.items() if report.figures[key] > bar]
    beyond += [key for key, bar in LEAST.items() if report.figures[key] < bar]
    print(f"beyond their bar: {', '.join(beyond) or 'none'}")
    if wanted.markdown:
        print("\n".join(markdown(report)))
    print(json.dumps({key: round(value, 2) for key, value in report.figures.items()}))


if __name__ == "__main__":
    main()
