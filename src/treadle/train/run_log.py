"""What a step reports: one line, a row of metrics.jsonl, TensorBoard."""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from treadle.ir.trace import Trace
from treadle.simulator import measure


@dataclass(frozen=True)
class StepFacts:
    """The facts of one step. `step` counts from 1: the number of steps done."""

    step: int
    loss: float
    """The mean cross entropy of a token in nats, without auxiliary losses."""

    aux_loss: float | None
    tokens_per_s: float
    """Of all time since the step before was reported: evaluations, saves and traces in it count."""

    bubble: float | None
    """The idle share of the busiest rank; None where it was not measured."""

    hidden: float | None
    """The share of communication that runs beside computation; None where it was not measured or there is none."""

    peak_bytes: int
    """The most memory of any rank: of its GPU since the last line, else of its process since its start."""

    grad_norm: float
    """Before clipping."""

    lr: float

    def line(self, steps: int, *, on_gpu: bool = True) -> str:
        """Return the line that is printed; lines of a run are aligned. Memory is a GPU's, or else a whole process's.

        Example:
            >>> facts = StepFacts(7, 2.5, 0.01, 1234.5, 0.25, None, 2**30, 1.5, 3e-4)
            >>> facts.line(7).split("  ")[:4]
            ['step 7/7', 'loss', '2.5000', 'aux 0.0100']

        """
        of = "peak" if on_gpu else "process"
        aux = "" if self.aux_loss is None else f"  aux {self.aux_loss:.4f}"
        return (
            f"step {self.step:>{len(str(steps))}}/{steps}  loss {self.loss:7.4f}{aux}  {self.tokens_per_s:>7,.0f} tok/s"
            f"  bubble {_share(self.bubble)}  hidden {_share(self.hidden)}  {of} {self.peak_bytes / 2**30:5.2f} GiB"
            f"  norm {self.grad_norm:7.3f}  lr {self.lr:.2e}"
        )


def _share(value: float | None) -> str:
    return "     -" if value is None else f"{value:6.1%}"


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def overlap_of(trace: Trace) -> tuple[float, float | None]:
    """Return the bubble of a step and the hidden share of its communication."""
    metrics = measure(trace)
    hidden = sum(rank.communication.hidden for rank in metrics.ranks)
    total = sum(rank.communication.total for rank in metrics.ranks)
    return metrics.bubble, hidden / total if total else None


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that this rank has had: of its GPU since the last call, else of its process."""
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak: int = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def _open_rows(path: Path) -> FileIO:
    """Open a file of rows to add to it; a row that a kill cut off stays a line of its own."""
    file = FileIO(path, "a+")
    size = file.seek(0, os.SEEK_END)
    if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
        file.write(b"\n")
    return file


def _add_row(file: FileIO, row: bytes) -> None:
    """Write a whole row, or raise OSError and write none of it."""
    begin = file.seek(0, os.SEEK_END)
    written = file.write(row)
    if written < len(row):
        file.truncate(begin)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class RunLog:
    """Writes what rank 0 knows: lines, metrics.jsonl, TensorBoard. On other ranks it does nothing.

    A file that cannot be written, as on a full disk, is a line, and the run goes on. Rows have the time, in seconds
    since 1970, and the number of torchrun's `restart`: after one, steps since the checkpoint come again.
    """

    def __init__(
        self, output: Path, rank: int, *, steps: int, tensorboard: bool, on_gpu: bool, restart: int = 0
    ) -> None:
        self._restart = restart
        self._steps, self._on_gpu, self._speaks = steps, on_gpu, rank == 0
        self._file: FileIO | None = None
        self._lost = 0
        self._board: Any = None
        if not self._speaks:
            return
        output.mkdir(parents=True, exist_ok=True)
        self._file = _open_rows(output / "metrics.jsonl")
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(output / "tensorboard"))

    def say(self, line: str) -> None:
        """Print a line."""
        if self._speaks:
            say(line)

    def step(self, facts: StepFacts, *, printed: bool) -> None:
        """Write a step."""
        values = asdict(facts)
        self._write(values)
        if printed:
            self.say(facts.line(self._steps, on_gpu=self._on_gpu))
        del values["step"]
        for name, value in values.items():
            self._chart(f"train/{name}", value, facts.step)

    def evaluation(self, step: int, loss: float, num_tokens: int) -> None:
        """Write the loss on held-out text."""
        self._write({"step": step, "held_out_loss": loss, "held_out_tokens": num_tokens})
        self.say(
            f"step {step:>{len(str(self._steps))}}/{self._steps}  held-out loss {loss:.4f} ({num_tokens:,} tokens)"
        )
        self._chart("held_out/loss", loss, step)

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            written = {**row, "time": round(time.time(), 3), "restart": self._restart}
            _add_row(self._file, (json.dumps(written) + "\n").encode())
        except OSError as error:
            if not self._lost:
                self.say(f"metrics.jsonl has no row of step {row['step']}, and none until one can be written: {error}")
            self._lost += 1
        else:
            if self._lost:
                self.say(f"metrics.jsonl goes on with step {row['step']}; it lacks {self._lost} rows")
            self._lost = 0

    def _chart(self, name: str, value: float | None, step: int) -> None:
        if self._board is not None and value is not None:
            with self.unless_full(f"what TensorBoard shows of step {step}"):
                self._board.add_scalar(name, value, step)
                return
            self._close_board()

    def _close_board(self) -> None:
        board, self._board = self._board, None
        with suppress(OSError):
            board.close()

    @contextmanager
    def unless_full(self, what: str) -> Iterator[None]:
        """Report what cannot be written in a line instead of an error."""
        try:
            yield
        except OSError as error:
            self.say(f"{what} could not be written: {error}")

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._close_board()
