"""Files of schedules in torch's pipeline runtime: verified when they are loaded, overlapped cells run as they mean.

    runtime = _PipelineScheduleRuntime(stages, n_microbatches=8, loss_fn=loss_fn)
    load_schedule(runtime, "dualpipev.csv")
    runtime.step(...)

torch's runtime is private and changes between versions: tests run this with torch 2.13.0.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from treadle.api import load_save, verbs
from treadle.ir import Schedule

WITH_MESSAGES = re.compile(r"[0-9](SEND|RECV)_")
"""What a file with messages contains."""


def load_clean(path: str | Path) -> Schedule:
    """Read the schedule of a file.

    Raises:
        ValueError: the verifier objects to the file, or it holds no schedule.

    """
    schedule = load_save.load(path)
    if not isinstance(schedule, Schedule):
        raise ValueError(
            f"{path} holds no schedule; torch's runtime loads what 'treadle show 1f1b --pp 4 -m 8 --format torch-csv' "
            "writes"
        )
    report = verbs.verify(schedule)
    if not report.clean:
        raise ValueError(f"{path} is not clean, so it is not run:\n{report}")
    return schedule


def load_schedule(runtime: Any, path: str | Path) -> Schedule:
    """Load torch's CSV into a `_PipelineScheduleRuntime` if it is clean, and let it run overlapped cells.

    Args:
        runtime: torch's, with the stages of this rank.
        path: a file of cells, to which torch adds the messages, or one with messages, which it runs as it stands.

    Returns:
        The schedule of the file.

    Raises:
        ValueError: the verifier objects to the file, or the file is no schedule of this runtime's micro-batches.

    """
    from torch.distributed.pipelining.schedules import OVERLAP_F_B

    schedule = load_clean(path)
    wanted = runtime._n_microbatches
    if schedule.num_microbatches != wanted:
        raise ValueError(
            f"{path} has {schedule.num_microbatches} micro-batches and the runtime {wanted}; "
            f"write the file with -m {wanted}, or make the runtime with n_microbatches={schedule.num_microbatches}"
        )
    with_messages = WITH_MESSAGES.search(Path(path).read_text("utf-8"))
    runtime._load_csv(str(path), format="compute_comms" if with_messages else "compute_only")
    runtime.register_custom_function(OVERLAP_F_B, run_overlapped)
    return schedule


def run_overlapped(action: Any, ctx: Any) -> None:
    """Run an overlapped cell: both messages first, then its forward, then its backward.

    For `runtime.register_custom_function(OVERLAP_F_B, run_overlapped)`. The halves begin when both have what they read,
    as a schedule means it; without a function torch waits for the backward's message after the forward. They run one
    after the other, on the calling thread and the current stream: messages overlap with them, they not with each other.
    torch hands a step's `loss_kwargs` to no custom function: they are read from the runtime's attribute of that name.
    """
    forward, backward = action.sub_actions
    runtime = ctx.schedule_ref
    stages = {stage.stage_index: stage for stage in runtime._stages}
    for half, posted, maker in (
        (forward, runtime.fwd_recv_ops, forward.stage_index - 1),
        (backward, runtime.bwd_recv_ops, backward.stage_index + 1),
    ):
        if 0 <= maker < runtime._num_stages and maker not in stages:
            _wait(action, half, posted)
        runtime._assert_unsharded(stages[half.stage_index])
    _run_forward(runtime, stages, forward, ctx)
    _run_backward(runtime, stages, backward)


def _wait(action: Any, half: Any, posted: dict[tuple[int, int], Any]) -> None:
    works = posted.pop((half.stage_index, half.microbatch_index), None)
    if works is None:
        raise ValueError(f"{action} is reached before the receive of {half} is posted; `treadle verify` shows where")
    for work in works:
        work.wait()


def _run_forward(runtime: Any, stages: dict[int, Any], action: Any, ctx: Any) -> None:
    stage, mb = stages[action.stage_index], action.microbatch_index
    output = stage.forward_one_chunk(mb, ctx.arg_mbs[mb], ctx.kwarg_mbs[mb], save_forward_output=True)
    runtime._maybe_compute_loss(stage, output, ctx.target_mbs, mb, getattr(runtime, "loss_kwargs", None))
    reader = stages.get(action.stage_index + 1)
    if reader is not None:  # at the turn of a V
        reader.set_local_fwd_input(output, mb)


def _run_backward(runtime: Any, stages: dict[int, Any], action: Any) -> None:
    stage, mb = stages[action.stage_index], action.microbatch_index
    runtime.backward_counter[action.stage_index] += 1
    last = runtime.backward_counter[action.stage_index] == runtime._n_microbatches
    stage.backward_one_chunk(mb, loss=runtime._maybe_get_loss(stage, mb), full_backward=True, last_backward=last)
    reader = stages.get(action.stage_index - 1)
    if reader is not None:
        reader.set_local_bwd_input(stage.get_local_bwd_output(mb), mb)
