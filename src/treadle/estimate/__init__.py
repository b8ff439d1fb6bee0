"""Estimates of what ops take and what ranks hold, from a model's shape and a cluster's rates, without GPU or torch."""

from treadle.estimate.cluster import Cluster, load_cluster
from treadle.estimate.job import Job
from treadle.estimate.job_memory import MemoryEstimate, MemoryOptions, estimate_memory
from treadle.estimate.model_shape import ModelShape, load_model
from treadle.estimate.op_costs import estimate_costs

__all__ = [
    "Cluster",
    "Job",
    "MemoryEstimate",
    "MemoryOptions",
    "ModelShape",
    "estimate_costs",
    "estimate_memory",
    "load_cluster",
    "load_model",
]
