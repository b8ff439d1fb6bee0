"""Running schedules on torch.distributed: `Pipeline`, and what a stage may return."""

from treadle.dist.boundary import Boundary, Spec
from treadle.runtime.faults.watch import RankLost
from treadle.runtime.model.stage import Output
from treadle.runtime.pipeline import Pipeline
from treadle.runtime.report import StepReport

__all__ = ["Boundary", "Output", "Pipeline", "RankLost", "Spec", "StepReport"]
