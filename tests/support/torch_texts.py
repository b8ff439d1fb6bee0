"""What the installed torch writes: its schedules as CSV, and a profile of one of them.

torchrun --nproc-per-node 2 examples/profile_pipelining.py --schedule Interleaved1F1B --microbatches 4 --output profile
python -m tests.support.torch_texts profile       keeps both in tests/golden/torch, under torch's version
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.distributed.pipelining import schedules

from tests.support.paths import GOLDEN

TEXTS = GOLDEN / "torch"
PP, NUM_MB = 2, 4
KEPT = ("ph", "cat", "name", "pid", "tid", "ts", "dur")


class Written(NamedTuple):
    """A class of torch's, how many stages a rank has, and what else its constructor is given."""

    class_name: str
    vpp: int
    options: dict[str, Any]


WRITTEN = {
    "interleaved": Written("ScheduleInterleaved1F1B", 2, {}),
    "interleaved_defer_reduce_grad_wait": Written("ScheduleInterleaved1F1B", 2, {"defer_reduce_grad_wait": True}),
    "interleaved_max_outstanding_sends": Written("ScheduleInterleaved1F1B", 2, {"max_outstanding_sends": 1}),
    "zb-h1": Written("ScheduleInterleavedZeroBubble", 1, {}),
    "zb-v": Written("ScheduleZBVZeroBubble", 2, {}),
    "zb-v_defer_pp_recv": Written("ScheduleZBVZeroBubble", 2, {"defer_pp_recv": True}),
    "dualpipev": Written("ScheduleDualPipeV", 2, {}),
}


def version_of(text: str) -> tuple[int, int]:
    """The version of a release without its patches: 2.15 of 2.15.0+cpu."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def kept_for_this_torch() -> Path:
    """The texts of the newest version that is kept and not newer than the installed one."""
    installed = version_of(torch.__version__)
    versions = [version_of(path.name) for path in TEXTS.iterdir()]
    return TEXTS / "{}.{}".format(*max(version for version in versions if version <= installed))


def texts() -> dict[str, str]:
    """The CSV of each of torch's schedules that this torch can write, stages being stand-ins."""
    written = {}
    for name, (class_name, vpp, options) in WRITTEN.items():
        made = getattr(schedules, class_name)
        if not set(options) <= set(inspect.signature(made).parameters):
            continue
        stages = [SimpleNamespace(num_stages=PP * vpp, group_size=PP, group_rank=0, submod=None) for _ in range(vpp)]
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "theirs.csv"
            made(stages, NUM_MB, **options)._dump_csv(str(path))
            written[name] = path.read_text()
    return written


def extract(path: Path) -> str:
    """What an import reads of a rank's profile: a step of it, an event a line."""
    profile = json.loads(path.read_text())
    annotations = [event for event in profile["traceEvents"] if event.get("cat") == "user_annotation"]
    first = min((event for event in annotations if event["name"].startswith("ProfilerStep#")), key=lambda e: e["ts"])
    end = first["ts"] + first["dur"]
    events = [
        json.dumps({key: event[key] for key in KEPT}) for event in annotations if first["ts"] <= event["ts"] < end
    ]
    about = {key: profile[key] for key in ("schemaVersion", "distributedInfo", "baseTimeNanoseconds") if key in profile}
    return json.dumps(about)[:-1] + ', "traceEvents": [\n' + ",\n".join(events) + "\n]}\n"


def main() -> None:
    """Keep what the installed torch writes."""
    directory = TEXTS / "{}.{}".format(*version_of(torch.__version__))
    (directory / "profile").mkdir(parents=True, exist_ok=True)
    for name, text in texts().items():
        (directory / f"{name}.csv").write_text(text)
    for path in sorted(Path(sys.argv[1]).glob("rank*_trace.json")):
        (directory / "profile" / path.name).write_text(extract(path))


if __name__ == "__main__":
    main()
