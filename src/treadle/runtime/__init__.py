"""Running schedules on torch.distributed: `Pipeline`, what a stage may return, and the stream checker."""

from treadle.host.extras import brought_by

with brought_by("run", needed_by="treadle.runtime"):
    from treadle.dist.boundary import Boundary, Spec
    from treadle.runtime.checker import CheckReport, StreamChecker, check_streams
    from treadle.runtime.faults.watch import RankLostError
    from treadle.runtime.model.losses import FurtherLoss, StageOutput
    from treadle.runtime.model.mtp import MTPBlock
    from treadle.runtime.options import RunOptions
    from treadle.runtime.pipeline import Pipeline
    from treadle.runtime.report import StepReport

__all__ = [
    "Boundary",
    "CheckReport",
    "FurtherLoss",
    "MTPBlock",
    "Pipeline",
    "RankLostError",
    "RunOptions",
    "Spec",
    "StageOutput",
    "StepReport",
    "StreamChecker",
    "check_streams",
]

RankLost = RankLostError  # its name until 0.1; removed in 0.3
