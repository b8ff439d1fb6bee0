"""Steps of up to 131,072 GPUs, every GPU simulated: `python benchmarks/every_gpu.py`.

1. PP16 x EP64 x DP128 with 0.1 % of GPUs 1.2 times slower, folded: CPU seconds and peak memory of a whole process.
2. The same mesh, 200 draws of which GPUs are slow, under several schedules.
3. How CPU seconds and memory grow with each size, folded and unfolded, from PP8 x EP8 x DP8 on.

Each part, and each row of the third, runs in a process of its own, where numba's cache is warm. The last line is JSON.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

MESH = {"ep": 64, "dp": 128}
SIZE = {"pp": 16, "microbatches": 128}
STUDIED = {"1f1b": 1, "interleaved": 4, "interleaved-overlap": 4, "zb-h1": 1, "zb-v": 2, "dualpipev": 2}
"""Schedules of the second part, with their chunks on each rank."""
DRAWS = 200

START = {"pp": 8, "vpp": 2, "m": 64, "layers": 64, "ep": 8, "dp": 8}
"""The third part's mesh of 512 GPUs; each row makes a size larger. With `random` each GPU has a factor of its own."""
ROWS = (
    {},
    {"pp": 16},
    {"vpp": 4},
    {"m": 128},
    {"layers": 128},
    {"ep": 32},
    {"dp": 32},
    {"dp": 32, "random": 0.05},
    {"ep": 64, "dp": 256},
)
UNFOLDED_OPS = 15_000_000
"""Rows with more ops than this are not simulated unfolded."""


def folded() -> dict:
    """Part 1: all that `treadle simulate --every-gpu` computes."""
    from treadle.folding.folded_metrics import measure_folded
    from treadle.folding.folding import fold
    from treadle.simulator import Stragglers

    costs, pipeline = _pipeline("interleaved-overlap", vpp=4, layers=64, **SIZE, **MESH)
    lowered = time.process_time()
    factors = Stragglers(0.001, 1.2).factors(pipeline.num_ranks * MESH["ep"] * MESH["dp"], seed=0)
    step = fold(pipeline, costs, **MESH, slowness=factors)
    simulated = time.process_time()
    metrics = measure_folded(step)
    cpu_s, peak_gb = time.process_time(), _peak_gb()
    assert len(step.ends) == len(metrics.ranks) == 131_072
    print(f"{step}")
    print(f"CPU: imports, generate and lower {lowered:.2f} s, ends of all ranks {simulated - lowered:.2f} s, ", end="")
    print(f"metrics of all ranks {cpu_s - simulated:.2f} s; peak {peak_gb:.2f} GB")
    return {
        "every_gpu_ranks": step.num_ranks,
        "every_gpu_cpu_s": round(cpu_s, 2),
        "every_gpu_ends_cpu_s": round(simulated, 2),
        "every_gpu_peak_gb": round(peak_gb, 2),
    }


def study() -> dict:
    """Part 2."""
    from treadle.folding.stragglers import straggler_study
    from treadle.simulator import Stragglers

    begin = time.perf_counter()
    lowered = {name: _pipeline(name, vpp=vpp, layers=64, **SIZE, **MESH) for name, vpp in STUDIED.items()}
    costs, pipelines = lowered["1f1b"][0], {name: pipeline for name, (_, pipeline) in lowered.items()}
    found = straggler_study(pipelines, costs, **MESH, stragglers=Stragglers(0.001, 1.2), draws=DRAWS, progress=_show)
    seconds, cpu_s = time.perf_counter() - begin, time.process_time()
    print(f"{'schedule':20} {'step s':>8} {'p10':>7} {'median':>7} {'p90':>7} {'max':>7}")
    for row in found.as_dict()["rows"]:
        shares = " ".join(f"{row[name]:7.2%}" for name in ("p10", "median", "p90", "max"))
        print(f"{row['name']:20} {row['base'] / 1e6:8.2f} {shares}")
    print(f"{DRAWS} draws of {len(pipelines)} schedules: {seconds:.0f} s, {cpu_s:.0f} s CPU, peak {_peak_gb():.2f} GB")
    return {
        "study_draws": DRAWS,
        "study_schedules": len(pipelines),
        "study_s": round(seconds, 1),
        "study_cpu_s": round(cpu_s, 1),
        "study_peak_gb": round(_peak_gb(), 2),
        "least_slowed": found.least_slowed.name,
        "fastest": found.fastest.name,
    }


def row(way: str, size: str) -> dict:
    """A row of part 3: one mesh, folded or unfolded."""
    from treadle.folding.folding import fold
    from treadle.passes.mesh import spread
    from treadle.simulator import Stragglers, simulate
    from treadle.simulator.slowness import random_factors

    costs, small = _pipeline("interleaved", pp=4, vpp=2, microbatches=64, layers=64, ep=2, dp=2)
    assert fold(small, costs, ep=2, dp=2).makespan == simulate(spread(small, ep=2, dp=2), costs).makespan
    given = json.loads(size)  # numba has read what it compiled
    mesh = {"ep": given["ep"], "dp": given["dp"]}
    shape = {"vpp": given["vpp"], "layers": given["layers"], **mesh}
    costs, pipeline = _pipeline("interleaved", pp=given["pp"], microbatches=given["m"], **shape)
    num_ranks = pipeline.num_ranks * mesh["ep"] * mesh["dp"]
    factors = Stragglers(0.001, 1.2).factors(num_ranks, seed=0)
    if "random" in given:
        factors = random_factors(num_ranks, given["random"], seed=0)
    before, held_gb = time.process_time(), _peak_gb()
    if way == "folded":
        makespan = fold(pipeline, costs, **mesh, slowness=factors).makespan
    else:
        makespan = simulate(spread(pipeline, **mesh), costs, slowness=factors).makespan
    return {
        "ranks": num_ranks,
        "ops": pipeline.num_ops * mesh["ep"] * mesh["dp"],
        "cpu_s": time.process_time() - before,
        "more_gb": _peak_gb() - held_gb,
        "makespan": makespan,
    }


def growth() -> dict:
    """Part 3."""
    print(f"from {', '.join(f'{name} {value}' for name, value in START.items())}; 0.1 % of GPUs slower")
    print(f"{'':20} {'GPUs':>7} {'ops':>12}   folded: {'CPU s':>6} {'GB':>5}   unfolded: {'CPU s':>6} {'GB':>5}")
    for change in ROWS:
        size = json.dumps({**START, **change})
        small = _child("row", "folded", size)
        line = f"{small['cpu_s']:14.2f} {small['more_gb']:7.2f}"
        if small["ops"] <= UNFOLDED_OPS:
            large = _child("row", "unfolded", size)
            assert large["makespan"] == small["makespan"]
            line += f" {large['cpu_s']:17.2f} {large['more_gb']:5.2f}"
        name = ", ".join(f"{key} {value}" for key, value in change.items()) or "as it is"
        print(f"{name:20} {small['ranks']:7} {small['ops']:12} {line}", flush=True)
    return {}


def _pipeline(name: str, *, pp: int, vpp: int, microbatches: int, layers: int, ep: int, dp: int) -> tuple:
    """Costs, and the Program of one pipeline."""
    import treadle
    from treadle.costs import load_costs
    from treadle.lowering import LoweringOptions, lower

    costs = load_costs("deepseek-v3-h800")
    options = LoweringOptions(model_layers=layers, by_layer=True, moe=True, ep=ep, dp=dp)
    schedule = treadle.generate(name, pp=pp, microbatches=microbatches, **({"vpp": vpp} if vpp > 1 else {}))
    return costs, lower(schedule, costs, options)


def _peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def _show(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _child(*arguments: str) -> dict:
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    *told, last = done.stdout.splitlines()
    print(*told, sep="\n", end="\n" if told else "", flush=True)
    return json.loads(last)


PARTS = {"folded": folded, "study": study, "growth": growth}


def main() -> None:
    """Runs the parts, or the one named."""
    if len(sys.argv) > 1:
        name, *arguments = sys.argv[1:]
        print(json.dumps(row(*arguments) if name == "row" else PARTS[name](*arguments)))
        return
    _child("folded")  # numba compiles, or reads what it compiled before
    result = {}
    for part in PARTS:
        result |= _child(part)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
