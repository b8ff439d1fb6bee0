"""The checks in their order, and what runs them."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from treadle.schedules import SCHEDULES
from treadle.selfcheck.check_experts import check_experts
from treadle.selfcheck.check_first import LAYERS, check_layer
from treadle.selfcheck.check_gradients import check_gradients
from treadle.selfcheck.check_lanes import check_lanes
from treadle.selfcheck.check_report import CheckResult, CheckStatus, FailedError, Passed, SelfcheckReport, SkippedError
from treadle.selfcheck.check_steps import check_offload, check_overlap
from treadle.selfcheck.check_streams import check_stream_order
from treadle.selfcheck.check_update import check_update
from treadle.selfcheck.setup import Setup, describe_machine

UNEXPECTED = "an error that no check expects; report it with this file"

Tell = Callable[[str, CheckResult | None], None]
"""Told the name of a check when it begins (None), and its result when it has ended."""


class Check(NamedTuple):
    """A check by name."""

    name: str
    run: Callable[[Setup], Passed]


def all_checks() -> Iterator[Check]:
    """Yield the checks: what others need comes first."""
    for name in LAYERS:
        yield Check(name, partial(check_layer, name=name))
    yield Check("lanes", check_lanes)
    yield Check("experts", check_experts)
    for name in SCHEDULES:
        yield Check(f"gradients: {name}", partial(check_gradients, name=name))
    yield Check("stream checker", check_stream_order)
    yield Check("overlap", check_overlap)
    yield Check("offload", check_offload)
    yield Check("weight update", check_update)


def run_checks(
    setup: Setup, tell: Tell = lambda name, result: None, settings: Mapping[str, str] | None = None
) -> SelfcheckReport:
    """Run all checks, one after the other; a failed one does not stop the rest.

    `settings` are those of the environment that the report is to name.
    """
    begun = time.monotonic()
    results = []
    for check in all_checks():
        tell(check.name, None)
        results.append(run_check(check, setup))
        tell(check.name, results[-1])
    return SelfcheckReport(
        machine=describe_machine(),
        settings=settings or {},
        device_type=setup.kind,
        backend=setup.backend,
        num_ranks=setup.num_ranks,
        quick=setup.quick,
        seconds=time.monotonic() - begun,
        checks=tuple(results),
    )


def run_check(check: Check, setup: Setup) -> CheckResult:
    """Run one check; whatever it raises is its result."""
    begun = time.monotonic()
    status: CheckStatus = "failed"
    advice, numbers = "", dict[str, float]()
    try:
        passed = check.run(setup)
        status, about, numbers = "passed", passed.about, dict(passed.numbers)
    except SkippedError as error:
        status, about = "skipped", str(error)
    except FailedError as error:
        about, advice = error.found, error.advice
    except Exception as error:
        about, advice = "".join(traceback.format_exception_only(error)).strip(), UNEXPECTED
    return CheckResult(check.name, status, about, advice, time.monotonic() - begun, numbers)
