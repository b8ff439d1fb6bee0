"""Running schedules on torch.distributed: `Pipeline`, and what a stage may return."""

from treadle.host.extras import brought_by

with brought_by("run", needed_by="treadle.runtime"):
    from treadle.dist.boundary import Boundary, Spec
    from treadle.runtime.faults.watch import RankLostError
    from treadle.runtime.model.stage import StageOutput
    from treadle.runtime.options import RunOptions
    from treadle.runtime.pipeline import Pipeline
    from treadle.runtime.report import StepReport

__all__ = ["Boundary", "Pipeline", "RankLostError", "RunOptions", "Spec", "StageOutput", "StepReport"]

RankLost = RankLostError  # its name until 0.1; removed in 0.3
