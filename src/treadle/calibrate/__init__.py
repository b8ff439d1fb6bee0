"""Calibrating: a cluster's constants, fitted to runs that were measured on it.

run_columns.py         the columns of a file of runs
runs_file.py           runs from the file
constants_of_job.py    the constants that a job's step depends on
log_fit.py             the most likely values of logarithms, given a prior
path_form.py           a step as a function of them: its critical paths
prior.py               what is believed of them before
fit.py                 the most likely constants
calibration.py         all of it in a row
calibration_report.py  what was found
cluster_file.py        the cluster as a file

A simulated step is as long as its critical path, and each op on it takes a sum of terms, each proportional to a
constant. So one simulation gives the seconds that a step spends on every constant, exactly. A path stays one under
other constants: a step is the longest of the paths found so far, and the fit adds paths until the simulator agrees.
"""

from treadle.calibrate.calibration import calibrate
from treadle.calibrate.calibration_report import CalibrationReport, EstimatedRun, FittedConstant
from treadle.calibrate.cluster_file import cluster_text
from treadle.calibrate.runs_file import MeasuredRun, read_runs

__all__ = [
    "CalibrationReport",
    "EstimatedRun",
    "FittedConstant",
    "MeasuredRun",
    "calibrate",
    "cluster_text",
    "read_runs",
]
