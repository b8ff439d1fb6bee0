"""Checks that Treadle works on this machine: its lanes, gradients, overlap, offload and weight updates.

    report = run_checks(Setup(num_ranks=4), tell=print)

`treadle selfcheck` is this with a table. A check spawns ranks where it needs them, one for each device, or on the CPU;
it passes, fails, or is skipped for a reason. None of them judges speed: what was measured stands beside what was
predicted.

    setup.py      what is checked: device, backend, ranks         gradients.py  every schedule against one process
    report.py     results                                         steps.py      overlap and offload, against prediction
    checks.py     the checks in their order                       update.py     a weight update, against prediction
    ranks.py      processes in one group                          lanes.py      order on real lanes
    models.py     what the ranks train                            experts.py    grouped experts against a loop
    settings.py   variables that the backend needs                streams.py    steps under the stream checker
"""

from treadle.selfcheck.checks import run_checks
from treadle.selfcheck.report import CheckResult, SelfcheckReport
from treadle.selfcheck.setup import Setup

__all__ = ["CheckResult", "SelfcheckReport", "Setup", "run_checks"]
