"""What benchmarks and tests of the trainer share: real runs under torchrun, watched from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "configs" / "moe_tiny.toml"
TRAINER = ("-m", "treadle.train")


@contextmanager
def started_run(
    flags: Sequence[str], num_ranks: int, log: Path, *, restarts: int = 0, program: Sequence[str] = TRAINER
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run under torchrun, its output in `log`; nothing of it outlives the context."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "0.1", *program, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            yield process
        finally:
            ranks = rank_processes(process)  # in sessions of their own
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                for rank in ranks:
                    _kill(rank)
            process.wait()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def rank_processes(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the processes of a run's ranks, in order of ranks; none while torchrun starts them."""
    found = {}
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in map(int, children):
            entries = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            found.update({int(entry[5:]): child for entry in entries if entry.startswith(b"RANK=")})
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [found[rank] for rank in sorted(found)]


def rows_of(output: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl so far; one that a kill cut off is left out."""
    path = output / "metrics.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def losses_of(output: Path) -> dict[int, float]:
    """Return the loss of each step; a step that a restart repeated counts as it was last."""
    return {row["step"]: row["loss"] for row in rows_of(output) if "loss" in row}


def held_out_of(output: Path) -> dict[int, float]:
    """Return the held-out loss after some steps."""
    return {row["step"]: row["held_out_loss"] for row in rows_of(output) if "held_out_loss" in row}
