"""`python -m treadle.train` that waits after some steps, so that a test meets every rank there, however fast it is.

TREADLE_TEST_HELD is a directory: after step N, where it has a file `at N`, ranks wait until that is gone.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from treadle.train.main import main
from treadle.train.run_log import StepFacts
from treadle.train.trainer import RunResult, Trainer

DIRECTORY = "TREADLE_TEST_HELD"


def held_at(directory: Path, step: int) -> Path:
    """Return the file that holds ranks after a step."""
    return directory / f"at {step}"


def _wait(facts: StepFacts) -> None:
    while held_at(Path(os.environ[DIRECTORY]), facts.step).exists():
        time.sleep(0.01)


if __name__ == "__main__":
    run = Trainer.run

    def held_run(self: Trainer) -> RunResult:
        return run(self, after_step=_wait)

    Trainer.run = held_run  # type: ignore[assignment, method-assign]
    sys.exit(main())
