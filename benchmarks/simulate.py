"""How fast programs are made, verified and simulated: `python benchmarks/simulate.py`.

1. A 10-million-op program: Treadle's simulator against a bare numba sweep over the same arrays, alternating in one run;
   and generate + lower + verify + simulate of it, with the peak of memory.
2. PP64 V2 M1024 at the grain of cells, all included, against torch's own generator, lowering and simulation of it.
3. A step of 2,048 GPUs, every GPU its own lanes, 5 % random slowness a GPU.

Each part runs in a process of its own. The last line is JSON.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace

LARGE = {"pp": 32, "vpp": 4, "microbatches": 512}
LARGE_LAYERS = 11
ROUNDS = 7


def large_program() -> dict:
    """Part 1."""
    import numpy as np

    import treadle
    from bare_sweep import bare_sweep
    from treadle.costs import durations, load_costs
    from treadle.lowering import LoweringOptions, lower
    from treadle.simulator import simulate
    from treadle.verifier import verify_program

    costs = load_costs("deepseek-v3-h800")
    options = LoweringOptions(layers=LARGE_LAYERS, moe=True, offload=True)
    small = lower(treadle.generate("interleaved-overlap", pp=4, vpp=2, microbatches=8), costs, options)
    warm = simulate(small, costs)
    verify_program(small, durations(small, costs))  # numba compiles, or reads what it compiled before

    begin = time.perf_counter()
    schedule = treadle.generate("interleaved-overlap", **LARGE)
    generated = time.perf_counter()
    program = lower(schedule, costs, options)
    lowered = time.perf_counter()
    report = verify_program(program, durations(program, costs))
    verified = time.perf_counter()
    trace = simulate(program, costs)
    end = time.perf_counter()
    assert report.clean, report
    assert warm.makespan < trace.makespan
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6

    dur = durations(program, costs)
    arrays = (program.lane_ptr, program.lane_group, *program.groups, program.dep_ptr, program.dep, dur)
    assert np.array_equal(bare_sweep(*arrays), trace.end)
    rounds = [_round(program, costs, dur, arrays, lambda: lower(schedule, costs, options)) for _ in range(ROUNDS)]
    ratios = sorted(sim / bare for sim, bare, _, _ in rounds)
    verify_ratios = sorted(check / sim for sim, _, check, _ in rounds)
    lower_ratios = sorted(low / sim for sim, _, _, low in rounds)
    sim_s, bare_s = (statistics.median(part[k] for part in rounds) for k in (0, 1))
    print(f"{program.num_ops} ops: generate {generated - begin:.2f} s, lower {lowered - generated:.2f} s, ", end="")
    print(f"verify {verified - lowered:.2f} s, simulate {end - verified:.2f} s, peak {peak_gb:.2f} GB")
    print(f"lower / simulate: median {statistics.median(lower_ratios):.1f}, ", end="")
    print(f"{lower_ratios[0]:.1f} to {lower_ratios[-1]:.1f}")
    print(f"simulate / bare sweep: median {statistics.median(ratios):.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f}")
    print(f"verify / simulate: median {statistics.median(verify_ratios):.2f}, ", end="")
    print(f"{verify_ratios[0]:.2f} to {verify_ratios[-1]:.2f}")
    return {
        "ops": program.num_ops,
        "sim_ops_per_s": round(program.num_ops / sim_s),
        "bare_ops_per_s": round(program.num_ops / bare_s),
        "ratio": round(statistics.median(ratios), 3),
        "verify_ratio": round(statistics.median(verify_ratios), 2),
        "lower_s": round(statistics.median(low for *_, low in rounds), 2),
        "lower_ratio": round(statistics.median(lower_ratios), 1),
        "end_to_end_s": round(end - begin, 2),
        "peak_gb": round(peak_gb, 2),
    }


def _round(program, costs, dur, arrays, lower_again) -> tuple[float, float, float, float]:
    """Seconds of a simulation, the bare sweep, a verification and lowering, one after the other."""
    from bare_sweep import bare_sweep
    from treadle.simulator import simulate
    from treadle.verifier import verify_program

    marks = [time.perf_counter()]
    simulate(program, costs)
    marks.append(time.perf_counter())
    bare_sweep(*arrays)
    marks.append(time.perf_counter())
    verify_program(program, dur)
    marks.append(time.perf_counter())
    lower_again()
    marks.append(time.perf_counter())
    return marks[1] - marks[0], marks[2] - marks[1], marks[3] - marks[2], marks[4] - marks[3]


def against_torch() -> dict:
    """Part 2."""
    import treadle
    from treadle.costs import load_costs
    from treadle.passes.cells import lower_cells
    from treadle.simulator import simulate

    def ours(pp: int, num_mb: int) -> float:
        begin = time.perf_counter()
        schedule = treadle.generate("interleaved", pp=pp, vpp=2, microbatches=num_mb)
        assert treadle.verify(schedule).clean
        simulate(lower_cells(schedule), load_costs("unit"))
        return time.perf_counter() - begin

    ours(4, 8)
    treadle_s = [ours(64, 1024) for _ in range(7)]
    torch_s = {(pp, num_mb): _torch(pp, num_mb) for pp, num_mb in ((8, 128), (16, 256), (32, 512), (64, 1024))}
    for (pp, num_mb), parts in torch_s.items():
        generate, lower, simulated = parts
        print(f"torch PP{pp} V2 M{num_mb}: generate {generate:.2f} s, lower {lower:.2f} s, simulate {simulated:.2f} s")
    median = statistics.median(treadle_s)
    print(
        f"treadle PP64 V2 M1024, generate, verify, lower, simulate: {median:.2f} s, "
        f"{min(treadle_s):.2f} to {max(treadle_s):.2f}"
    )
    return {"torch_ratio": round(sum(torch_s[64, 1024]) / median)}


def _torch(pp: int, num_mb: int) -> tuple[float, float, float]:
    """Seconds of torch's generator, lowering and simulation of interleaved 1F1B with two stages a rank.

    The lowering is its runtime's own. Its simulator refuses what that adds for sharded parameters, so it gets the
    schedule with sends and receives alone, whose making is not counted.
    """
    from torch.distributed.pipelining import schedules

    size = SimpleNamespace(n_local_stages=2, pp_group_size=pp, _n_microbatches=num_mb, microbatches_per_round=pp)
    generate = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations
    begin = time.perf_counter()
    order = {rank: generate(size, rank) for rank in range(pp)}
    generated = time.perf_counter()
    runtime = object.__new__(schedules._PipelineScheduleRuntime)
    runtime.pp_group_size, runtime._n_microbatches, runtime._num_stages = pp, num_mb, 2 * pp
    runtime._stages, runtime._defer_pp_recv = [], False
    runtime._prepare_schedule_with_comms(order)
    lowered = time.perf_counter()
    compute = {rank: [action for action in row if action is not None] for rank, row in order.items()}
    plain = schedules._add_send_recv(compute, lambda stage: stage % pp, 2 * pp)
    begin_simulation = time.perf_counter()
    schedules._simulate_comms_compute(plain, lambda stage: stage % pp, 2 * pp)
    return generated - begin, lowered - generated, time.perf_counter() - begin_simulation


def cluster_2048() -> dict:
    """Part 3."""
    import treadle
    from treadle.costs import load_costs
    from treadle.lowering import LoweringOptions, lower
    from treadle.simulator import simulate

    costs = load_costs("deepseek-v3-h800")
    begin = time.perf_counter()
    schedule = treadle.generate("interleaved-overlap", pp=16, vpp=4, microbatches=128)
    program = lower(schedule, costs, LoweringOptions(layers=1, moe=True, ep=16, dp=8, every_gpu=True))
    trace = simulate(program, costs, slowness=0.05)
    seconds = time.perf_counter() - begin
    alike = simulate(program, costs)
    print(f"{program.num_ranks} GPUs, {program.num_ops} ops, {program.num_lanes} lanes: {seconds:.1f} s; ", end="")
    print(f"step {trace.makespan / 1e9:.2f} s with 5 % slowness, {alike.makespan / 1e9:.2f} s without")
    return {"cluster_2048_s": round(seconds, 1)}


PARTS = {"large": large_program, "torch": against_torch, "cluster": cluster_2048}


def main() -> None:
    """Runs the parts, or the one named."""
    if len(sys.argv) > 1:
        print(json.dumps(PARTS[sys.argv[1]]()))
        return
    result = {}
    for part in PARTS:
        done = subprocess.run([sys.executable, __file__, part], stdout=subprocess.PIPE, text=True, check=True)
        *told, last = done.stdout.splitlines()
        print(*told, sep="\n", flush=True)
        result |= json.loads(last)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
