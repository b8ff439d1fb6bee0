"""Makes the extracts beside this file from whole profiles: what an import reads, and nothing else.

python make.py torch PROFILE_DIRECTORY         of examples/profile_pipelining.py --schedule Interleaved1F1B --sleep-ms 5
python make.py megatron timeline-ST.json.gz    of github.com/ByteDance-Seed/StragglerAnalysis, Apache-2.0
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STEPS = 8


def write(path: Path, content: Any) -> None:
    """Write JSON, compressed; the same content makes the same bytes."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 9, mtime=0))


def torch(directory: Path) -> None:
    """Keep the annotations of each rank's file."""
    for path in sorted(directory.glob("rank*_trace.json")):
        profile = json.loads(path.read_text())
        kept = {key: value for key, value in profile.items() if key not in ("traceEvents", "traceName")}
        kept["host_name"] = "node0"
        fields = ("ph", "cat", "name", "pid", "tid", "ts", "dur")
        kept["traceEvents"] = [
            {key: event[key] for key in fields}
            for event in profile["traceEvents"]
            if event.get("cat") == "user_annotation"
        ]
        write(HERE / "torch" / f"{path.name}.gz", kept)


def megatron(path: Path) -> None:
    """Keep the last steps."""
    events = json.loads(gzip.decompress(path.read_bytes()))
    steps = sorted({event["args"]["step"] for event in events if event["ph"] == "X"})[-STEPS:]
    kept = [event for event in events if event["ph"] != "X" or event["args"]["step"] in steps]
    for event in kept:
        if event["ph"] == "X":
            event["ts"], event["dur"] = round(event["ts"], 1), round(event["dur"], 1)
            del event["cat"]
    write(HERE / "megatron" / "timeline.json.gz", kept)


if __name__ == "__main__":
    {"torch": torch, "megatron": megatron}[sys.argv[1]](Path(sys.argv[2]))
