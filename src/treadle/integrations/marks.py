"""Marks on the forwards and backwards of trainers that mark none, for `treadle import` and `treadle why`.

    with mark_megatron(), torch.profiler.profile(...) as profiler:
        ...  # train steps

Ranges are named as torch names those of its own runtime: `PP:3F1` is stage 3, forward, micro-batch 1. torch.profiler
writes them; `nvtx=True` opens NVTX ranges, for Nsight Systems. A mark takes microseconds, a micro-batch milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias

Range: TypeAlias = Callable[[str], AbstractContextManager[Any]]

_MARK = "_treadle_mark"
"""The attribute of a forward's output that names its stage and micro-batch; its backward is given the same object."""


@contextmanager
def mark_pipelining(*, nvtx: bool = False) -> Iterator[None]:
    """Mark the forwards and backwards of torch.distributed.pipelining's 1F1B, torchtitan's default schedule.

    Its other schedules mark theirs themselves.
    """
    from torch.distributed.pipelining.schedules import Schedule1F1B
    from torch.distributed.pipelining.stage import _PipelineStageBase

    opened, in_1f1b = _range(nvtx), ContextVar("in_1f1b", default=False)

    def step(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            token = in_1f1b.set(True)
            try:
                return original(*args, **kwargs)
            finally:
                in_1f1b.reset(token)

        return run

    def marked(letter: str, original: Any) -> Any:
        def run(stage: Any, mb: int, *args: Any, **kwargs: Any) -> Any:
            with opened(f"PP:{stage.stage_index}{letter}{mb}") if in_1f1b.get() else nullcontext():
                return original(stage, mb, *args, **kwargs)

        return run

    with (
        _replaced(Schedule1F1B, "_step_microbatches", step),
        _replaced(_PipelineStageBase, "forward_one_chunk", partial(marked, "F")),
        _replaced(_PipelineStageBase, "backward_one_chunk", partial(marked, "B")),
    ):
        yield


@contextmanager
def mark_megatron(opened: Range | None = None, *, nvtx: bool = False) -> Iterator[None]:
    """Mark the forwards and backwards of Megatron-core's schedules: without pipelining, 1F1B, interleaved, combined.

    `opened(name)` is a context manager for each of them; None: torch.profiler's or NVTX's range.

    Its schedules look their steps up when they call them, so those of a process that trains already are marked, too.
    """
    from megatron.core.pipeline_parallel import combined_1f1b, schedules

    steps = _MegatronSteps(_range(nvtx) if opened is None else opened)
    with (
        _replaced(schedules, "forward_step", steps.forward),
        _replaced(schedules, "backward_step", steps.backward),
        _replaced(combined_1f1b, "combined_forward_backward_step", steps.combined),
    ):
        yield


class _MegatronSteps:
    """Counts the micro-batches of each stage, and replaces Megatron's functions by marked ones."""

    def __init__(self, opened: Range) -> None:
        self._range = opened
        self._counts = Counter[int]()

    def forward(self, original: Any) -> Any:
        def run(func: Any, data: Any, model: Any, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
            name = self._next(kwargs.get("vp_stage"), num_microbatches)
            with self._range(f"PP:{name[0]}F{name[1]}"):
                result = original(func, data, model, num_microbatches, *args, **kwargs)
            _name(result[0], name)
            return result

        return run

    def backward(self, original: Any) -> Any:
        def run(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            stage, mb = getattr(_first(output_tensor), _MARK)
            with self._range(f"PP:{stage}B{mb}"):
                return original(input_tensor, output_tensor, *args, **kwargs)

        return run

    def combined(self, original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            forward_model, num_microbatches, backward_model, output = args[2], args[3], args[6], args[8]
            chunk = kwargs.get("f_model_chunk_id")
            name = self._next(chunk, num_microbatches) if forward_model is not None else None
            halves = [f"{name[0]}F{name[1]}"] if name is not None else []
            if backward_model is not None:
                stage, mb = getattr(_first(output), _MARK)
                halves.append(f"{stage}B{mb}")
            with self._range(f"PP:({';'.join(halves)})OVERLAP_F_B" if len(halves) > 1 else f"PP:{halves[0]}"):
                result = original(*args, **kwargs)
            if name is not None:
                _name(result[0], name)
            return result

        return run

    def _next(self, chunk: int | None, num_microbatches: int) -> tuple[int, int]:
        """Return the stage of a model chunk and the number of its next micro-batch in this step."""
        from megatron.core import parallel_state

        pp = parallel_state.get_pipeline_model_parallel_world_size()
        stage = (chunk or 0) * pp + parallel_state.get_pipeline_model_parallel_rank()
        self._counts[stage] += 1
        return stage, (self._counts[stage] - 1) % num_microbatches


def _name(output: Any, name: tuple[int, int]) -> None:
    """Note on a forward's output which it is."""
    setattr(_first(output), _MARK, name)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, list) else output


def _range(nvtx: bool) -> Range:
    import torch

    return torch.cuda.nvtx.range if nvtx else torch.profiler.record_function


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Put what `make` makes of a function in its place, and the function back afterwards."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
