"""Running schedules on torch.distributed: `Pipeline`, what a stage may return, and the stream checker.

    pipeline   what a user calls                     agreement, handshake, ties   what ranks compare before it runs
    rank_part  making it, to a frozen value; by module_checks, step_plan and stage_recipe
    executors  running it, on the part that was made; with feed and step_report
    model/     a rank's stages as autograd sees them      checker/   streams and an allocator that record
    run/       the executor and lane backends             faults/    which rank failed first, at which op

One list a rank: `lowering/running.py` merges computation and launches of the verified Program, and a communication op
stands before the computation during which it would start. Whatever a list waits for has ended, in one execution of the
whole Program, before the wait begins.

Before the first step ranks compare by name what must be the same (schedule, options, parameters); a step that failed
leaves nothing but changed buffers. Communicators are made from torch's backends, each by its members only, at most
eight a rank: torch's `new_group` must be called by all ranks, or names groups by counts that differ along a pipe. On a
device, control (shapes, agreement, clocks) goes over gloo, with deadlines.
"""

from treadle.host.extras import brought_by

with brought_by("run", needed_by="treadle.runtime"):
    from treadle.dist.boundary import Boundary, Spec
    from treadle.runtime.checker import CheckReport, StreamChecker, check_streams
    from treadle.runtime.faults.watch import RankLostError
    from treadle.runtime.model.losses import FurtherLoss, StageOutput
    from treadle.runtime.model.mtp_block import MTPBlock
    from treadle.runtime.model.segments import Segment, compute, exchange
    from treadle.runtime.pipeline import Pipeline
    from treadle.runtime.pipeline_options import RunOptions
    from treadle.runtime.step_report import StepReport

__all__ = [
    "Boundary",
    "CheckReport",
    "FurtherLoss",
    "MTPBlock",
    "Pipeline",
    "RankLostError",
    "RunOptions",
    "Segment",
    "Spec",
    "StageOutput",
    "StepReport",
    "StreamChecker",
    "check_streams",
    "compute",
    "exchange",
]
