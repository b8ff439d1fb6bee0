"""Make train.json.gz here, an extract of DeepSeek's published profile: `python tests/data/deepseek/make.py FILE`.

FILE is train.json of https://github.com/deepseek-ai/profile-data (H800, EP64, 4K tokens: an overlapped forward and
backward of 4 MoE layers), published for analysis. The extract has all events of the device, the calls that launched
them and the annotations, and of each only the fields that a reader uses; names of kernels are cut at their arguments.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
HERE = Path(__file__).parent


def extract(trace: dict[str, Any]) -> dict[str, Any]:
    """The same profile with what a reader uses."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    on_device = [event for event in events if event["cat"] in DEVICE]
    wanted = {event["args"]["correlation"] for event in on_device}
    launches = [e for e in events if e["cat"] in LAUNCHES and e["args"].get("correlation") in wanted]
    annotations = [event for event in events if event["cat"] == "user_annotation"]
    kept = [
        *(_event(event, ("stream", "correlation")) for event in on_device),
        *(_event(event, ("correlation",)) for event in launches),
        *(_event(event, ()) for event in annotations),
    ]
    return {
        "schemaVersion": trace["schemaVersion"],
        "deviceProperties": [{key: trace["deviceProperties"][0][key] for key in ("id", "name")}],
        "distributedInfo": trace["distributedInfo"],
        "source": "extract of train.json, https://github.com/deepseek-ai/profile-data",
        "traceEvents": kept,
    }


def _event(event: dict[str, Any], args: tuple[str, ...]) -> dict[str, Any]:
    made = {key: event[key] for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur")}
    made["name"] = re.sub(r"^void |[<(].*", "", made["name"], flags=re.DOTALL) if args else made["name"]
    return made | ({"args": {key: event["args"][key] for key in args}} if args else {})


def main() -> None:
    """Write the extract beside this file."""
    source = Path(sys.argv[1])
    text = gzip.decompress(source.read_bytes()) if source.suffix == ".gz" else source.read_bytes()
    made = json.dumps(extract(json.loads(text)), separators=(",", ":"))
    (HERE / "train.json.gz").write_bytes(gzip.compress(made.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
