"""Checks that Treadle works on this machine: its lanes, gradients, overlap, offload and weight updates.

    report = run_checks(Setup(num_ranks=4), tell=print)

`treadle selfcheck` is this with a table. A check spawns ranks where it needs them, one for each device, or on the CPU;
it passes, fails, or is skipped for a reason. None of them judges speed: what was measured stands beside what was
predicted.

setup.py            what is checked: device, backend, ranks
checks.py           the checks in their order
check_lanes.py      order on real lanes
check_gradients.py  every schedule against one process
check_experts.py    grouped experts against a loop
check_steps.py      overlap and offload, against prediction
check_streams.py    steps under the stream checker
check_update.py     a weight update, against prediction
settings.py         variables that the backend needs
ranks.py            processes in one group
models.py           what the ranks train
check_report.py     results
"""

from treadle.selfcheck.check_report import CheckResult, SelfcheckReport
from treadle.selfcheck.checks import run_checks
from treadle.selfcheck.setup import Setup

__all__ = ["CheckResult", "SelfcheckReport", "Setup", "run_checks"]
