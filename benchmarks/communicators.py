"""Orders of torch and Megatron on shared communicators: `python benchmarks/communicators.py [PP ...]`.

1. torch: our schedules, loaded by torch's runtime, which adds the messages: as it does by default, and with
   `defer_pp_recv=True`. Its own file with the messages is what `treadle verify` judges.
2. Megatron-core, if it is installed: 1F1B and interleaved 1F1B, as `megatron_issue.py` records them.
3. Seconds that judging takes, at PP16 M256: the order of issue known, numba's kernels loaded.

A row a case, a column a layout; the last line is JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_issue import schedule_of
from treadle.files import torch_csv
from treadle.ir import Schedule
from treadle.passes.cells import lower_cells
from treadle.passes.issue_order import IssueOrder
from treadle.schedules import generate
from treadle.verifier.communicator_queues import COMMUNICATORS, Creation, judge

NAMES = ("1f1b", "zb-h1", "interleaved", "interleaved-overlap", "zb-v", "dualpipev")
LAZY: tuple[Creation, ...] = ("lazy", "lazy-device")
COLUMNS = (*COMMUNICATORS, *(f"pair, {creation}" for creation in LAZY))


def torch_order(schedule: Schedule, *, defer: bool) -> Schedule:
    """Return a schedule with the messages that torch's runtime adds to it, in torch's order; stages are stand-ins."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    about = {"num_stages": schedule.placement.num_stages, "group_size": schedule.pp, "group_rank": 0, "submod": None}
    stages = [SimpleNamespace(**about) for _ in range(schedule.vpp)]
    runtime: Any = _PipelineScheduleRuntime(stages, schedule.num_microbatches, defer_pp_recv=defer)  # type: ignore
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "order.csv"
        path.write_text(torch_csv.dump(schedule))
        runtime._load_csv(str(path), format="compute_only")
        runtime._dump_csv(str(path), format="compute_comms")
        return torch_csv.parse(path.read_text())


def verdicts(schedule: Schedule) -> dict[str, str]:
    """Return the verdict on each layout, and on a communicator a pair that is made lazily."""
    program = lower_cells(schedule)
    order = IssueOrder.given(schedule, program)
    found = {layout: judge(program, order, layout).word for layout in COMMUNICATORS}
    return found | {f"pair, {creation}": judge(program, order, "pair", creation=creation).word for creation in LAZY}


def megatron_order(pp: int, vpp: int, num_mb: int) -> Schedule:
    """Return Megatron's schedule with its order of issue; a process of its own records it."""
    script = Path(__file__).with_name("megatron_issue.py")
    command = [sys.executable, str(script), str(pp), str(vpp), str(num_mb)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return schedule_of(lines, vpp)


def judging_seconds(name: str, pp: int, num_mb: int) -> dict[str, float]:
    """Return the seconds of each judgement, of an order that ends and of one with each receive before its reader."""
    program = lower_cells(generate(name, pp=pp, microbatches=num_mb))
    early, late = IssueOrder.early(program), IssueOrder.at_use(program)
    assert early is not None
    found = {}
    for what, order in (("early", early), ("at use", late)):
        for creation in ("before", *LAZY):
            began = time.perf_counter()
            judge(program, order, "pair", creation=creation)
            found[f"{what}, {creation}"] = round(time.perf_counter() - began, 3)
    return found


def main(sizes: list[int]) -> None:
    """Print all rows."""
    table: dict[str, dict[str, str]] = {}
    print(f"{'order':42}" + "".join(f"{column:>27}" for column in COLUMNS))
    for pp in sizes:
        for name in NAMES:
            for defer in (False, True):
                row = f"torch{' deferred' if defer else ''}: {name} p{pp} m{2 * pp}"
                schedule = generate(name, pp=pp, microbatches=2 * pp)
                table[row] = verdicts(torch_order(schedule, defer=defer))
                print(f"{row:42}" + "".join(f"{table[row][column]:>27}" for column in COLUMNS), flush=True)
        for vpp in (1, 2) if find_spec("megatron") else ():
            row = f"Megatron: {'interleaved' if vpp > 1 else '1f1b, batched'} p{pp} m{2 * pp}"
            table[row] = verdicts(megatron_order(pp, vpp, 2 * pp))
            print(f"{row:42}" + "".join(f"{table[row][column]:>27}" for column in COLUMNS), flush=True)
    judging_seconds("1f1b", 2, 4)
    seconds = {name: judging_seconds(name, 16, 256) for name in ("1f1b", "interleaved", "zb-v")}
    for name, found in seconds.items():
        print(f"{name} p16 m256: {', '.join(f'{what} {s:.3f} s' for what, s in found.items())}")
    print(json.dumps({"verdicts": table, "seconds": seconds}))


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [2, 4, 8, 16])
