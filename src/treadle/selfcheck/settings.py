"""Checks what a backend needs of the environment before runs on this machine can be told of a lost rank."""

from __future__ import annotations

import os

from treadle.dist.backends import NCCL
from treadle.dist.nccl_settings import NEEDED, wrong_settings
from treadle.selfcheck.check_report import FailedError, Passed, SkippedError
from treadle.selfcheck.setup import Setup


def check_settings(setup: Setup) -> Passed:
    """Tells which variables runs over NCCL need, and fails for those that are set to something else."""
    if setup.backend != NCCL:
        raise SkippedError(f"backend {setup.backend} needs no variables")
    here = {name: os.environ[name] for name in NEEDED if name in os.environ}
    wrong = wrong_settings({**NEEDED, **here})
    if wrong:
        raise FailedError("; ".join(wrong), "unset these variables, or set them as said")
    unset = " ".join(f"{name}={value}" for name, value in NEEDED.items() if name not in here)
    return Passed(f"your runs need {unset}, which the ranks of these checks set" if unset else "all are set as needed")
