"""The command `python -m treadle.train`: what it prints, and how it ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from treadle.host.errors import TreadleError
from treadle.train.command import parse_command
from treadle.train.nonfinite import NonFiniteError
from treadle.train.run_config import TrainConfig
from treadle.train.run_log import say
from treadle.train.world import is_own_error, leave_world, rank_of_launch

if TYPE_CHECKING:
    from treadle.train.trainer import Trainer

REFUSED, FAILED = 2, 1
"""Exit codes: the command or the configuration is wrong; the run failed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit code.

    An error is one line: rank 0's, and that of each rank that has another one.
    """
    rank = rank_of_launch()
    try:
        config = parse_command(sys.argv[1:] if arguments is None else arguments)
        if config.dry_run:
            return _dry_run(config, rank)
        from treadle.train.trainer import Trainer

        trainer = Trainer(config)
    except ValueError as error:
        _print_error(error, rank, alone=is_own_error(_one_line(error)))
        leave_world()
        return REFUSED
    except TreadleError as error:  # of another rank; each knows what it knows
        _print_error(error, rank, alone=True)
        return FAILED
    return _run(trainer, rank)


def _run(trainer: Trainer, rank: int) -> int:
    from treadle.train.checkpoint import SaveError

    try:
        trainer.run()
    except TreadleError as error:
        _print_error(error, rank, alone=not isinstance(error, NonFiniteError | SaveError))
        return FAILED
    trainer.close()
    return 0


def _dry_run(config: TrainConfig, rank: int) -> int:
    from treadle.train.run_dryrun import describe

    if rank == 0:
        say(str(describe(config)))
    return 0


def _print_error(error: Exception, rank: int, *, alone: bool) -> None:
    """Print an error that this rank has alone with its rank, one that all have once."""
    if alone or rank == 0:
        sys.stderr.write(f"error: rank {rank}: {_one_line(error)}\n" if alone else f"error: {_one_line(error)}\n")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
