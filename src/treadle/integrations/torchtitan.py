"""A schedule's file in torchtitan's trainer: a `pipelining_fn` for its `ModelSpec`.

    spec = dataclasses.replace(spec, pipelining_fn=pipelining_fn("zbv.csv", layout="Et*3|t*5|t*5|t*3L"))

The file gives the order and which rank holds which stage; `pipeline_parallel_schedule` and its CSV option are not read.
torchtitan's modules are private and change between versions: `.ci/torchtitan` runs this with torchtitan 0.3.0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from treadle.integrations.torch_pipelining import WITH_MESSAGES, load_clean, load_schedule
from treadle.ir import Schedule
from treadle.ir.blocks import parse_layout


@dataclass(frozen=True)
class Wanted:
    """The sizes that a torchtitan job and a schedule's file must have in common."""

    pp: int
    num_microbatches: int
    num_layers: int
    checkpoints: bool


def check_job(path: str | Path, schedule: Schedule, job: Wanted) -> None:
    """Check that torchtitan can run a file in a job.

    Raises:
        ValueError: it cannot, with the option to change.

    """
    placement, text = schedule.placement, Path(path).read_text("utf-8")
    if placement.pp != job.pp:
        raise ValueError(
            f"{path} has {placement.pp} ranks and parallelism.pipeline_parallel_degree is {job.pp}; "
            f"write the file with --pp {job.pp}, or set the degree to {placement.pp}"
        )
    if schedule.num_microbatches != job.num_microbatches:
        raise ValueError(
            f"{path} has {schedule.num_microbatches} micro-batches, and training.local_batch_size over "
            f"parallelism.pipeline_parallel_microbatch_size is {job.num_microbatches}; write the file with "
            f"-m {job.num_microbatches}, or set training.local_batch_size to {schedule.num_microbatches} micro-batches"
        )
    if placement.num_stages > job.num_layers:
        raise ValueError(
            f"{path} has {placement.num_stages} stages and the model {job.num_layers} layers; "
            "write a file with fewer chunks (--vpp) or ranks"
        )
    if job.checkpoints and re.search(r"\dI\d", text):
        raise ValueError(
            f"{path} splits backwards into dgrad and wgrad, and a module under activation checkpointing runs backward "
            "only once; set activation_checkpoint to None"
        )


def check_unshards(path: str | Path, parts: Sequence[Any]) -> None:
    """Check that a file with messages says when stages under FSDP gather their parameters.

    Raises:
        ValueError: it does not.

    """
    from torch.distributed.fsdp import FSDPModule

    text = Path(path).read_text("utf-8")
    shards = any(isinstance(module, FSDPModule) for part in parts for module in part.modules())
    if shards and WITH_MESSAGES.search(text) and "UNSHARD" not in text:
        raise ValueError(
            f"{path} has messages and no UNSHARD, and stages under FSDP do not compute without it; write the file with "
            "--format torch-comms --fsdp"
        )


def cut_of(layout: str, num_stages: int, num_layers: int) -> list[list[str]]:
    """Return the modules of each stage, by torchtitan's names, of a layout as `treadle balance` prints it.

    Raises:
        ValueError: the layout is of another model or number of stages.

    Example:
        >>> cut_of("Et|tL", 2, 2)
        [['tok_embeddings', 'layers.0'], ['layers.1', 'norm', 'lm_head']]

    """
    blocks = parse_layout(layout)
    layers = sum(block in "td" for stage in blocks for block in stage)
    if len(blocks) != num_stages or layers != num_layers or "m" in "".join(blocks):
        raise ValueError(
            f"the layout {layout} has {len(blocks)} stages and {layers} layers, the job {num_stages} and {num_layers}, "
            "without MTP blocks; 'treadle balance' prints one for these sizes"
        )
    names, at = [], 0
    for stage in blocks:
        mine: list[str] = []
        for block in stage:
            mine += {"E": ["tok_embeddings"], "L": ["norm", "lm_head"]}.get(block, [f"layers.{at}"])
            at += block in "td"
        names.append(mine)
    return names


def pipelining_fn(path: str | Path, layout: str | None = None) -> Callable[..., Any]:
    """Return the `pipelining_fn` that runs a file.

    Args:
        path: torch's CSV, of cells or with messages; the verifier judges it here.
        layout: the cut, as `treadle balance` prints it. None: `module_fqns_per_model_part`, or torchtitan's own cut.

    Raises:
        ValueError: the verifier objects to the file.

    """
    schedule = load_clean(path)

    def build(
        model: Any,
        *,
        parallel_dims: Any,
        training: Any,
        parallelism: Any,
        ac_config: Any,
        device: Any,
        model_config: Any,
        parallelize_fn: Any,
        loss_fn: Any,
        **others: Any,
    ) -> tuple[Any, list[Any], bool, bool]:
        from torch.distributed.pipelining import PipelineStage
        from torchtitan.distributed import pipeline_parallel as titan

        mesh = parallel_dims.get_mesh("pp")
        num_layers, num_stages = len(model_config.layers), schedule.placement.num_stages
        num_mb = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
        check_job(path, schedule, Wanted(mesh.size(), num_mb, num_layers, ac_config is not None))
        names: Sequence[list[str]] = parallelism.module_fqns_per_model_part or ()
        if layout is not None:
            names = cut_of(layout, num_stages, num_layers)
        elif not names:
            names = titan._generate_llm_fqn_per_model_part(
                num_stages,
                num_layers,
                parallelism.pipeline_parallel_first_stage_less_layers,
                parallelism.pipeline_parallel_last_stage_less_layers,
            )
        if len(names) != num_stages:
            raise ValueError(
                f"parallelism.module_fqns_per_model_part names {len(names)} stages, {path} {num_stages}; give as many"
            )
        apply = partial(
            parallelize_fn,
            parallel_dims=parallel_dims,
            training=training,
            parallelism=parallelism,
            ac_config=ac_config,
            **others,
        )
        mine = sorted(schedule.placement.stages[mesh.get_local_rank()])
        parts = [apply(titan._split_module(model, names[number])) for number in mine]
        check_unshards(path, parts)
        get_mesh = titan._build_get_mesh_callback(parallel_dims)
        stages = [
            PipelineStage(part, number, num_stages, device, group=mesh.get_group("pp"), get_mesh=get_mesh)
            for number, part in zip(mine, parts, strict=True)
        ]
        runtime = _runtime_class()(
            stages,
            n_microbatches=num_mb,
            loss_fn=lambda *args, **kwargs: loss_fn(*args, **kwargs)[0],
            scale_grads=False,
        )
        load_schedule(runtime, path)
        return runtime, parts, 0 in mine, num_stages - 1 in mine

    return build


def _runtime_class() -> Any:
    """Return torch's runtime with the `step` that torchtitan 0.3.0 calls, which gives micro-batches one by one.

    torch 2.13's `step` cuts a batch; that of later versions takes micro-batches by the same names.
    """
    from inspect import signature

    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    class MicrobatchRuntime(_PipelineScheduleRuntime):
        loss_kwargs: dict[str, Any] | None = None

        def step(self, *args: Any, loss_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
            self.loss_kwargs = loss_kwargs
            if "kwarg_mbs" not in kwargs or "kwarg_mbs" in signature(super().step).parameters:
                return super().step(*args, loss_kwargs=loss_kwargs, **kwargs)
            for stage in self._stages:
                stage.has_backward = self._has_backward
                stage.clear_runtime_states()
            kwargs["arg_mbs"] = kwargs.get("arg_mbs") or [()] * self._n_microbatches
            return self._step_microbatches(**kwargs, loss_kwargs=loss_kwargs)

    return MicrobatchRuntime
