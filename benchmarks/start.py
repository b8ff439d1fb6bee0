"""What commands cost to start, on a fresh install: seconds of CPU, the median and the spread of some runs.

    python benchmarks/start.py [--runs 7] [--python PATH]

Makes an environment of its own with `pip install .[view]`, or takes that of `--python`; no kernel is compiled yet. The
last line is JSON: the median seconds of each command, with what it is held to.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

MOST_CPU_S = {
    "--version": 0.3,
    "--help": 0.3,
    "show dualpipe --pp 8 -m 20": 0.5,
    "simulate dualpipe --pp 8 -m 20": 1.5,
    "verify dualpipe --pp 8 -m 20": 1.5,
    "simulate dualpipe --pp 16 -m 64": 1.5,
    "verify dualpipe --pp 16 -m 64": 1.5,
    "draw dualpipe --pp 8 -m 20 --palette dualpipe -o x.png": 4.0,
    "draw interleaved-overlap --pp 4 -m 16 --layers 1 --moe --offload --costs deepseek-v3-h800 -o x.png": 4.0,
}


def make_environment(directory: Path) -> Path:
    """A virtual environment with Treadle and what figures need; its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    python = directory / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", f"{ROOT}[view]"], check=True, stdout=sys.stderr)
    return python


def cpu_seconds(python: Path, command: str, directory: Path) -> float:
    """The seconds of one run, with no compiled kernel on disk."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with tempfile.TemporaryDirectory(dir=directory) as cache:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [python, "-m", "treadle", *command.split()],
            env={**env, "NUMBA_CACHE_DIR": cache},
            cwd=directory,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Runs the commands in turn, so that what else the machine does falls on all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--python", type=Path, help="of an environment that has Treadle")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="start-") as name:
        directory = Path(name)
        python = args.python if args.python is not None else make_environment(directory / "venv")
        for command in MOST_CPU_S:  # the first run of all writes Python's own bytecode
            cpu_seconds(python, command, directory)
        took: dict[str, list[float]] = {command: [] for command in MOST_CPU_S}
        for _ in range(args.runs):
            for command, seconds in took.items():
                seconds.append(cpu_seconds(python, command, directory))
    result = {}
    for command, seconds in took.items():
        median, most = statistics.median(seconds), MOST_CPU_S[command]
        print(f"{median:5.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), held to {most:g}: treadle {command}")
        result[command] = {"median": round(median, 3), "min": round(min(seconds), 3), "held_to": most}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
