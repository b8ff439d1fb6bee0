"""Weight updates at scale, on paper: `python benchmarks/weights_scale.py` (five minutes; --quick a few seconds).

1. The six rows that checkpoint-engine publishes, each as a Program under the simulator: a bandwidth and a constant
   fitted to two of them, the others predicted; every pair of rows; the same with H2D's bandwidth, not the constant.
2. What the rows on 256 devices leave over, read as a latency.
3. A trillion parameters to 2,048 devices: by buffers, sources and buckets, as a range, against the limits of the links.
4. The same targeted, from ranks that have the model into 128 replicas of TP16, each of which gets a copy of its own, or
   replicas as chains; with what a tensor costs besides its bytes, against the limit of the links.
5. How long the plan of that update takes to make, for all of the model's tensors.

Nothing here measures a network. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np

from treadle.ir.execute import execute
from treadle.ir.ops import OpKind
from treadle.ir.program import Program
from treadle.weights.bucket_stream import Stream, even_stream
from treadle.weights.matched_steps import matched_steps
from treadle.weights.update_lowering import lower_update
from treadle.weights.update_rates import Rates, simulate_update, update_ticks
from weights_model import plan_time

GB, GiB = 10**9, 1 << 30
TP = 16


@dataclass(frozen=True)
class Published:
    """A row of checkpoint-engine's table (its README, version 0.4): all devices broadcast to all."""

    name: str
    size_gb: int
    devices: int
    bucket_gib: float
    seconds: float


ROWS = (
    Published("GLM-4.5-Air BF16, 8 H800", 212, 8, 3.02, 3.47),
    Published("Qwen3-235B BF16, 8 H800", 470, 8, 2.67, 6.22),
    Published("DeepSeek-V3.1 FP8, 16 H20", 680, 16, 5.39, 10.19),
    Published("Kimi-K2 FP8, 16 H20", 1029, 16, 5.89, 14.36),
    Published("DeepSeek-V3.1 FP8, 256 H20", 680, 256, 8.00, 11.33),
    Published("Kimi-K2 FP8, 256 H20", 1029, 256, 8.00, 16.04),
)
SHORT = ("GLM", "Qwen3", "DS-16", "K2-16", "DS-256", "K2-256")
FITTED = (0, 3)


@cache
def program_of(row: Published) -> Program:
    """Its update: every device has as much, in buckets of the published size, with one H2D and two IPC buffers."""
    each = -(-row.size_gb * GB // row.devices)
    bucket = min(each, int(row.bucket_gib * GiB))
    stream = even_stream(row.devices, -(-each // bucket), bucket_bytes=bucket, total_bytes=row.size_gb * GB)
    return lower_update(stream)


def seconds(program: Program, rates: Rates) -> float:
    """What the simulator says."""
    trace = simulate_update(program, rates)
    return trace.makespan / trace.clock.ticks / 1e6


@cache
def shares(row: Published) -> dict[str, float]:
    """Seconds that a row takes if one thing only takes time: 1 GB/s of it, or 1 s. Times of an update add up."""
    program = program_of(row)
    alone = {"broadcast": Rates(broadcast=1e9), "h2d": Rates(h2d=1e9), "constant": Rates(start_s=1.0)}
    return {name: seconds(program, rates) for name, rates in alone.items()}


@dataclass(frozen=True)
class Fit:
    """Two rows, what they give for two unknowns, and how far the other rows are from what that predicts."""

    rows: tuple[int, int]
    broadcast_gb_s: float
    second: float
    errors: dict[int, float]

    @property
    def worst(self) -> float:
        """The largest error of the rows that were not fitted."""
        return max(map(abs, self.errors.values()))


def fit(rows: tuple[int, int], second: str) -> Fit | None:
    """None where both unknowns are in one proportion in the two rows, so that nothing tells them apart."""
    matrix = np.array([[shares(ROWS[i])["broadcast"], shares(ROWS[i])[second]] for i in rows])
    if np.isclose(matrix[0, 0] * matrix[1, 1], matrix[0, 1] * matrix[1, 0], rtol=1e-6):
        return None
    slowness, value = np.linalg.solve(matrix, [ROWS[i].seconds for i in rows])
    errors = {}
    for i, row in enumerate(ROWS):
        if i not in rows:
            known = slowness * shares(row)["broadcast"] + value * shares(row)[second]
            errors[i] = float(known / row.seconds - 1)
    return Fit(rows, float(1 / slowness), float(value), errors)


def fits(second: str) -> Iterator[tuple[tuple[int, int], Fit | None]]:
    """Every pair of rows."""
    for rows in combinations(range(len(ROWS)), 2):
        yield rows, fit(rows, second)


def fitted_rates() -> Rates:
    """From GLM-4.5-Air and Kimi-K2 on 16."""
    found = fit(FITTED, "constant")
    assert found is not None
    return Rates(broadcast=found.broadcast_gb_s * 1e9, start_s=found.second)


def latency_per_device() -> list[float]:
    """Seconds a broadcast and a device that the rows on 256 devices take beyond the fitted rates."""
    found = []
    for row in ROWS[4:]:
        left = row.seconds - seconds(program_of(row), fitted_rates())
        num_broadcasts = int(program_of(row).cell.max()) + 1
        found.append(left / num_broadcasts / row.devices)
    return found


DEVICES, MODEL_BYTES = 2048, 1029 * GB
BUFFERS = ((0, 1), (0, 2), (1, 1), (1, 2), (2, 2))
COLUMNS = ((16, 8 * GiB), (120, 8 * GiB), (480, 2 * GiB), (2048, MODEL_BYTES // DEVICES + 1), (2048, GiB // 4))
"""Devices that have the model, each as much of it, and the size of a bucket."""
NODE_NIC_GB_S, NIC_GB_S = 400, 50
"""Eight links of 400 Gb/s a node of eight devices, one for each."""

Key = tuple[int, int, int, int]
"""Sources, bytes of a bucket, H2D buffers, IPC buffers."""


def large_stream(sources: int, bucket_bytes: int, num_h2d: int, num_ipc: int) -> Stream:
    """The first devices broadcast to all 2,048, of which each takes a sixteenth (TP16)."""
    each = -(-MODEL_BYTES // sources)
    part = even_stream(
        sources,
        -(-each // bucket_bytes),
        bucket_bytes=min(bucket_bytes, each),
        total_bytes=MODEL_BYTES,
        taken_share=1 / TP,
        num_h2d=num_h2d,
        num_ipc=num_ipc,
    )
    return Stream(DEVICES, num_h2d, num_ipc, part.source, part.round, part.size_bytes, part.taken_bytes)


def ends_of_range() -> tuple[Rates, Rates]:
    """Nothing but the fitted rates and fast copies; and the latency of the rows on 256 devices, with slow copies."""
    fitted = fitted_rates()
    hop = max(latency_per_device())
    low = Rates(h2d=50e9, broadcast=fitted.broadcast, reload=1e12, start_s=fitted.start_s)
    high = Rates(h2d=24e9, broadcast=fitted.broadcast, reload=1e11, latency_s=hop * DEVICES, start_s=fitted.start_s)
    return low, high


def large_table(columns: tuple[tuple[int, int], ...]) -> dict[Key, tuple[float, float]]:
    """Low and high seconds."""
    low, high = ends_of_range()
    table = {}
    for sources, bucket in columns:
        for num_h2d, num_ipc in BUFFERS:
            program = lower_update(large_stream(sources, bucket, num_h2d, num_ipc))
            table[sources, bucket, num_h2d, num_ipc] = (seconds(program, low), seconds(program, high))
    return table


REPLICAS, TENSORS = DEVICES // TP, 139_339
PACK_TENSOR_S, LOAD_TENSOR_S = 11e-6, 6e-6
"""Processor time of a tensor besides its bytes, at its source and at each worker (benchmarks/update_tensors.py)."""
TRAINERS = (2048, 256, 16)
"""Ranks that have the model, each as much of it, of one of the sixteen parts."""


def routed_stream(trainers: int, *, chained: bool, replicas: int = REPLICAS) -> Stream:
    """Each part goes to its replicas from as many trainers, which begin with different replicas."""
    each, per_part = MODEL_BYTES // trainers, trainers // TP
    num = -(-each // (GiB // 4 if chained else GiB))
    routes: list[tuple[int, ...]] = []
    for turn in range(1 if chained else replicas):
        for trainer in list(range(trainers)) * num:
            part, begin = trainer % TP, trainer // TP * replicas // per_part + turn
            takers = [(begin + i) % replicas * TP + part for i in range(replicas if chained else 1)]
            routes.append((replicas * TP + trainer, *takers))
    source = np.array([route[0] for route in routes], np.int32)
    size = np.full((len(routes), 1), -(-each // num))
    turns = np.arange(len(routes), dtype=np.int32) // trainers
    devices = replicas * TP + trainers
    return Stream(devices, 2, 2, source, turns, size[:, 0], size, matched_steps(routes, 2))


def routed_seconds(program: Program, rates: Rates) -> float:
    """What the simulator says, with what tensors cost besides their bytes."""
    dur, clock = update_ticks(program, rates)
    tensors = TENSORS * TP * program.size_bytes / MODEL_BYTES
    for kind, cost_s in ((OpKind.H2D, PACK_TENSOR_S), (OpKind.RELOAD, LOAD_TENSOR_S)):
        mine = program.kind == kind
        dur[mine] += np.rint(tensors[mine] * cost_s * 1e6 * clock.ticks).astype(np.int64)
    times = execute(program, dur)
    assert times.finished
    return float(times.end.max()) / clock.ticks / 1e6


def routed_limit(stream: Stream) -> float:
    """Seconds that the link with most to send or to receive needs."""
    hops = stream.hops
    assert hops is not None
    size = stream.size_bytes[hops.bucket].astype(float)
    most = max(np.bincount(ends, size).max() for ends in (hops.sender, hops.receiver))
    return float(most) / 1e9 / NIC_GB_S


def routed_table(trainers: tuple[int, ...]) -> dict[str, tuple[float, float, float]]:
    """The limit, and low and high seconds: without latency, and with that of the rows on 256 devices for each hop."""
    low = Rates(h2d=50e9, broadcast=NIC_GB_S * 1e9, reload=1e12)
    high = Rates(h2d=24e9, broadcast=NIC_GB_S * 1e9, reload=1e11, latency_s=max(latency_per_device()))
    table = {}
    for number in trainers:
        for name, chained in (("targeted", False), ("chained", True)):
            stream = routed_stream(number, chained=chained)
            program = lower_update(stream)
            table[f"{number} {name}"] = (
                routed_limit(stream),
                routed_seconds(program, low),
                routed_seconds(program, high),
            )
    return table


def print_routed(table: dict[str, tuple[float, float, float]]) -> None:
    """Part 4."""
    print(f"\nthe same into {REPLICAS} replicas of TP{TP}, over a link of 400 Gb/s each, seconds: limit, low - high")
    for name, (limit_s, low_s, high_s) in table.items():
        print(f"{name:18}{limit_s:8.2f}{low_s:8.2f} - {high_s:.2f}{low_s / limit_s:8.2f} times the limit")


def print_rows() -> Fit:
    """Part 1, first table."""
    rates, found = fitted_rates(), fit(FITTED, "constant")
    assert found is not None
    names = " and ".join(SHORT[i] for i in FITTED)
    print(f"\nfitted on {names}: {found.broadcast_gb_s:.1f} GB/s, {found.second:.2f} s")
    print(f"{'':30}{'GB':>6}{'rounds':>8}{'published':>11}{'simulated':>11}{'error':>8}")
    for i, row in enumerate(ROWS):
        program = program_of(row)
        took = seconds(program, rates)
        rounds = int(program.mb.max()) + 1
        mark = " fitted" if i in FITTED else f"{took / row.seconds - 1:+7.1%}"
        print(f"{row.name:30}{row.size_gb:6}{rounds:8}{row.seconds:11.2f}{took:11.2f} {mark}")
    return found


def print_pairs(second: str, unit: str, show: Callable[[float], str]) -> dict[str, float]:
    """Part 1, all pairs; the worst error of those whose values can be."""
    print(f"\nevery pair, bandwidth and {second}: {unit}; errors of the other four rows")
    worst = {}
    for rows, found in fits(second):
        name = f"{SHORT[rows[0]]:>7} {SHORT[rows[1]]:7}"
        if found is None:
            print(f"{name} the two rows are in one proportion: nothing to tell the two apart by")
            continue
        errors = " ".join(f"{SHORT[i]} {error:+.1%}" for i, error in found.errors.items())
        sound = found.second > 0 and found.broadcast_gb_s > 0
        print(
            f"{name} {found.broadcast_gb_s:6.1f} GB/s {show(found.second):>10}  worst {found.worst:6.1%}"
            f"  {errors}{'' if sound else '   (below zero)'}"
        )
        if sound:
            worst[f"{SHORT[rows[0]]}+{SHORT[rows[1]]}"] = found.worst
    return worst


def print_large(table: dict[Key, tuple[float, float]]) -> None:
    """Part 3."""
    columns = list(dict.fromkeys((sources, bucket) for sources, bucket, *_ in table))
    streams = [large_stream(*column, 1, 2) for column in columns]
    print(f"\n1029 GB (a trillion parameters in FP8) to {DEVICES} devices, seconds, low - high")
    print(f"low   {ends_of_range()[0]}\nhigh  {ends_of_range()[1]}")
    heads = {
        "sources": [f"{sources}" for sources, _ in columns],
        "bucket": [f"{bucket / GiB:.2f} GiB" for _, bucket in columns],
        "rounds": [f"{stream.num_rounds}" for stream in streams],
        "broadcasts": [f"{stream.num_buckets}" for stream in streams],
    }
    for name, cells in heads.items():
        print(f"{name:22}" + "".join(f"{cell:>16}" for cell in cells))
    for num_h2d, num_ipc in BUFFERS:
        ends = [table[sources, bucket, num_h2d, num_ipc] for sources, bucket in columns]
        print(f"{num_h2d} H2D, {num_ipc} IPC buffers  " + "".join(f"{f'{a:.1f} - {b:.1f}':>16}" for a, b in ends))
    for name, took in limits().items():
        print(f"limit: {name:70}{took:6.2f} s")


def limits() -> dict[str, float]:
    """What the links would allow, if nothing else took time."""
    return {
        "every byte into every node once, over its eight 400 Gb/s links": MODEL_BYTES / 1e9 / NODE_NIC_GB_S,
        "every byte into every device over its own 400 Gb/s link": MODEL_BYTES / 1e9 / NIC_GB_S,
        "only what a device takes (TP16), over its own link": MODEL_BYTES / TP / 1e9 / NIC_GB_S,
    }


def main() -> None:
    """All parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="without many sources and without the plan")
    quick = parser.parse_args().quick
    found = print_rows()
    constants = print_pairs("constant", "s", lambda value: f"{value:.2f} s")
    copies = print_pairs("h2d", "GB/s a device", lambda value: f"{1 / value:.0f} GB/s")
    hops = latency_per_device()
    print(f"\nleft over on 256 devices, a broadcast and a device: {', '.join(f'{hop * 1e6:.1f} us' for hop in hops)}")
    table = large_table(COLUMNS[:2] if quick else COLUMNS)
    print_large(table)
    routed = routed_table(TRAINERS[1:2] if quick else TRAINERS)
    print_routed(routed)
    plan = {} if quick else plan_time()
    if plan:
        print(
            f"\nplan: {plan['tensors']} tensors, {plan['pieces']} pieces, {plan['buckets']} buckets of at most "
            f"{plan['bucket_bytes'] / GiB:.2f} GiB: layouts {plan['layouts_s']:.1f} s, plan {plan['plan_s']:.1f} s, "
            f"digest {plan['digest_s']:.1f} s, {plan['peak_gb']:.1f} GB\n"
            f"told: {plan['layouts']} layouts in {plan['message_mb']:.1f} MB to every rank, made in "
            f"{plan['list_s']:.1f} s, read in {plan['read_s']:.1f} s; the largest layout alone "
            f"{plan['largest_layout_mb']:.1f} MB"
        )
    result = {
        "broadcast_gb_s": found.broadcast_gb_s,
        "constant_s": found.second,
        "worst": found.worst,
        "pairs": constants,
        "pairs_h2d": copies,
        "latency_us": [hop * 1e6 for hop in hops],
        "large": {f"{n} x {bucket / GiB:.2f} GiB, {h}+{i}": took for (n, bucket, h, i), took in table.items()},
        "limits": limits(),
        "routed": routed,
        "plan": plan,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
