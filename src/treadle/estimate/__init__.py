"""Estimates of what ops take and what ranks hold, from a model's shape and a cluster's rates, without GPU or torch."""

from treadle.estimate.calibration import Calibration
from treadle.estimate.cluster import Cluster, load_cluster
from treadle.estimate.constants import MeasuredRun
from treadle.estimate.job import Job
from treadle.estimate.memory import MemoryEstimate, MemoryOptions, estimate_memory
from treadle.estimate.model_shape import ModelShape, load_model
from treadle.estimate.op_costs import estimate_costs
from treadle.estimate.step_time import StepEstimate, estimate_step

__all__ = [
    "Calibration",
    "Cluster",
    "Job",
    "MeasuredRun",
    "MemoryEstimate",
    "MemoryOptions",
    "ModelShape",
    "StepEstimate",
    "estimate_costs",
    "estimate_memory",
    "estimate_step",
    "load_cluster",
    "load_model",
]
