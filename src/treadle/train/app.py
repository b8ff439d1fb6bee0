"""The command `python -m treadle.train`: what it prints, and how it ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from treadle.host.errors import TreadleError
from treadle.train.command import parse_command
from treadle.train.config import TrainConfig
from treadle.train.launch import leave_world, rank_of_launch
from treadle.train.metrics import say
from treadle.train.nonfinite import NonFiniteError

if TYPE_CHECKING:
    from treadle.train.trainer import Trainer

REFUSED, FAILED = 2, 1
"""Exit codes: the command or the configuration is wrong; the run failed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit code.

    Errors that all ranks have in common are one line of rank 0.
    """
    rank = rank_of_launch()
    try:
        config = parse_command(sys.argv[1:] if arguments is None else arguments)
        if config.dry_run:
            return _dry_run(config, rank)
        from treadle.train.trainer import Trainer

        trainer = Trainer(config)
    except ValueError as error:
        leave_world()
        return _refuse(error, rank, REFUSED)
    return _run(trainer, rank)


def _run(trainer: Trainer, rank: int) -> int:
    try:
        trainer.run()
    except NonFiniteError as error:
        return _refuse(error, rank, FAILED)
    except TreadleError as error:  # of another rank; each knows what it knows
        sys.stderr.write(f"rank {rank}: {_one_line(error)}\n")
        return FAILED
    trainer.close()
    return 0


def _dry_run(config: TrainConfig, rank: int) -> int:
    from treadle.train.dryrun import describe

    if rank == 0:
        say(str(describe(config)))
    return 0


def _refuse(error: Exception, rank: int, code: int) -> int:
    if rank == 0:
        sys.stderr.write(f"{_one_line(error)}\n")
    return code


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
