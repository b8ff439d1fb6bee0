"""torchtitan 0.3.0: a saved configuration (JSON) or a command line, and the command line of a job.

Entries are named as on its command line, without dashes: `parallelism.tensor_parallel_degree`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from treadle.estimate import Job
from treadle.schedules import default_schedule, family
from treadle.trainers.job_description import Described, Unread
from treadle.trainers.launch_script import read_script
from treadle.trainers.pipelining_class import class_of, lacking, schedule_of
from treadle.trainers.yaml_text import dotted

TITLE = "torchtitan"
_PARALLEL = {
    "tensor_parallel_degree": "tp",
    "context_parallel_degree": "cp",
    "pipeline_parallel_degree": "pp",
    "expert_parallel_degree": "ep",
}
NAMES = {field: f"parallelism.{name}" for name, field in _PARALLEL.items()} | {
    "micro_batch_size": "parallelism.pipeline_parallel_microbatch_size",
    "global_batch_size": "training.global_batch_size",
    "seq_len": "training.seq_len",
    "vpp": "stages per rank (parallelism.pipeline_parallel_layers_per_stage)",
    "layout": "parallelism.module_fqns_per_model_part",
    "num_hidden_layers": "the number of layers",
}
_MODELS = {
    "llama3-8b": ("llama3", "llama3_8b", "8B"),
    "llama3-70b": ("llama3", "llama3_70b", "70B"),
    "llama3-405b": ("llama3", "llama3_405b", "405B"),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b", "671B"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b", "30B-A3B"),
    "gpt-oss-120b": ("gpt_oss", "gpt_oss_120b", "120b"),
}
"""Its module, configuration and flavor of our presets."""

_TWO_STAGES = 2
"""Stages on a rank where `layers_per_stage` is not given and the schedule takes several."""

_MOST_LESS = 8
_SHARDING = {"parameters": "always", "gradients": "never"}
SHARDINGS = ("parameters", "gradients", "none")
_KEPT = {"full": ("full",), "none": ()}
_EFFECTS = {
    "compile.enable": ("step", False),
    "compile.enable_async_tensor_parallel": ("step", False),
    "parallelism.enable_fsdp_symm_mem": ("step", False),
    "parallelism.spmd_backend": ("step", "spmd_types"),
    "parallelism.pipeline_parallel_schedule_csv": ("step and memory", ""),
    "parallelism.context_parallel_load_balancer": ("step", "headtail"),
    "parallelism.module_fqns_per_model_part": ("step and memory", None),
    "training.enable_cpu_offload": ("step and memory", False),
    "training.dtype": ("memory", "float32"),
    "training.mixed_precision_param": ("step and memory", "bfloat16"),
    "debug.deterministic": ("step", False),
    "debug.batch_invariant": ("step", False),
}
"""Entries that the estimate does not follow: what they touch, and the value that it assumes."""


def read(text: str) -> Described | None:
    """Return the job that a saved configuration or a launch describes, or None if the text is neither."""
    if text.lstrip().startswith("{"):
        try:
            table = json.loads(text)
        except ValueError:
            return None
        if "parallelism" not in table or "training" not in table:
            return None
        kind, spec = _checkpointing(table.get("activation_checkpoint")), table.get("model_spec") or {}
        name = next(
            (name for name, row in _MODELS.items() if (row[0], row[2]) == (spec.get("name"), spec.get("flavor"))), ""
        )
        return _described(dotted(table), kind, name or f"{spec.get('name')} {spec.get('flavor')}")
    if "--parallelism." not in text and "--training." not in text:
        return None
    script = read_script(text)
    entries: dict[str, Any] = {}
    kind = "selective"
    for option, values in script.options.items():
        entries[option.lstrip("-").replace("-", "_")] = _value(values[0]) if values else True
        kind = next((word.partition(":")[2] for word in values if word.startswith("activation-checkpoint:")), kind)
    name = next((name for name, row in _MODELS.items() if row[1] == entries.get("config")), "")
    return _described(entries, kind, name or str(entries.get("config", "")))


def settings(job: Job) -> dict[str, str]:
    """Return the options of a job, by name; a subcommand has its value in its name.

    Raises:
        ValueError: torchtitan cannot run the job.

    """
    if (reason := _lacking(job)) is not None:
        raise ValueError(f"{TITLE}: {reason}")
    local = job.global_batch_size // job.dp if job.pp > 1 else job.micro_batch_size
    found = {f"parallelism.{name}": str(getattr(job, field)) for name, field in _PARALLEL.items()}
    found |= {"parallelism.data_parallel_shard_degree": "-1"}
    if job.sharding == "none":
        found["parallelism.data_parallel_replicate_degree"] = str(job.dp)
        found["parallelism.data_parallel_shard_degree"] = "1"
    else:
        found["parallelism.fsdp_reshard_after_forward"] = _SHARDING[job.sharding]
    if job.tp > 1 and not job.sequence_parallel:
        found["parallelism.no-enable-sequence-parallel"] = ""
    if job.pp > 1:
        found |= _stages(job)
    found |= {
        "training.local_batch_size": str(local),
        "training.global_batch_size": str(job.global_batch_size),
        "training.seq_len": str(job.seq_len),
    }
    if job.cuda_graph == "none":
        found["training.disable_cuda_graphs"] = ""
    kind = next(name for name, parts in _KEPT.items() if parts == job.recompute)
    return {f"--{name}": value for name, value in found.items()} | {f"activation-checkpoint:{kind}": ""}


def launch(job: Job) -> str:
    """Return a script that launches a job with torchtitan's trainer."""
    module, config, _ = _MODELS.get(job.model.name, ("${MODULE:?}", "${CONFIG:?}", ""))
    nodes, each = max(1, job.cluster.num_gpus // 8), min(8, job.cluster.num_gpus)
    words = [f"{option} {shlex.quote(value)}" if value else option for option, value in settings(job).items()]
    lines = [f"--module {module} --config {config}", *words]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# {job.model.name} on {job.cluster.name}, for torchtitan 0.3.0.",
            f"torchrun --nnodes {nodes} --nproc-per-node {each} ${{RENDEZVOUS:-}} -m torchtitan.train \\",
            " \\\n".join(f"    {line}" for line in lines),
            "",
        ]
    )


def _lacking(job: Job) -> str | None:
    """Return what torchtitan cannot run of a job, or None."""
    if (reason := lacking(job, SHARDINGS)) is not None:
        return reason
    if job.cuda_graph == "partial" or (job.cuda_graph == "whole" and job.pp > 1):
        return "CUDA graphs are of the whole step without a pipeline"
    if job.layout is not None and job.pp > 1 and _weights(job) is None:
        return f"its weights of embedding and head give no layers of {'|'.join(job.layout)}"
    return None


def _stages(job: Job) -> dict[str, str]:
    weights = _weights(job) if job.layout is not None else (0, 0)
    assert weights is not None
    total = job.model.num_hidden_layers + sum(weights)
    return {
        "parallelism.pipeline_parallel_schedule": class_of(job.schedule),
        "parallelism.pipeline_parallel_microbatch_size": str(job.micro_batch_size),
        "parallelism.pipeline_parallel_layers_per_stage": str(-(-total // job.num_stages)),
        "parallelism.pipeline_parallel_first_stage_less_layers": str(weights[0]),
        "parallelism.pipeline_parallel_last_stage_less_layers": str(weights[1]),
    }


def _weights(job: Job) -> tuple[int, int] | None:
    """Return the layers that embedding and head count as, such that torchtitan cuts the stages of a job."""
    for first in range(_MOST_LESS):
        for last in range(_MOST_LESS):
            layers = job.model.num_hidden_layers + first + last
            each = -(-layers // job.num_stages)
            whole = -(-layers // each) == job.num_stages
            if whole and _cut(job.model.blocks, job.num_stages, first, last) == job.layout:
                return first, last
    return None


def _cut(blocks: str, stages: int, first: int, last: int) -> tuple[str, ...] | None:
    """Return the stages that torchtitan cuts; None where one would have fewer layers than it is to have less."""
    layers = blocks.count("t") + blocks.count("d")
    each, more = divmod(layers + first + last, stages)
    if each < max(first, last, 1):
        return None
    counts = [each + (stage < more) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    ends = [sum(counts[: stage + 1]) + 1 for stage in range(stages - 1)]
    return tuple(blocks[start:end] for start, end in zip([0, *ends], [*ends, len(blocks)], strict=True))


def _described(entries: Mapping[str, Any], kind: str, model: str) -> Described:
    found = Described(model=model)
    job = found.job
    job |= {field: int(entries.get(f"parallelism.{name}", 1)) for name, field in _PARALLEL.items()}
    pp = job["pp"]
    local, batch = entries.get("training.local_batch_size", 8), entries.get("training.global_batch_size", -1)
    size = entries.get("parallelism.pipeline_parallel_microbatch_size", 1) if pp > 1 else local
    job |= {"micro_batch_size": int(size), "seq_len": int(entries.get("training.seq_len", 2048))}
    if int(batch) > 0:
        job["global_batch_size"] = int(batch)
    job["sequence_parallel"] = job["tp"] == 1 or _sequence_parallel(entries)
    job["sharding"] = _sharding(entries, pp)
    job["cuda_graph"] = "none" if pp > 1 or entries.get("training.disable_cuda_graphs") else "whole"
    job["recompute"] = _KEPT.get(kind, ())
    if kind not in _KEPT:
        found.unread.append(Unread(f"activation_checkpoint:{kind}", "", "step and memory"))
    job["stages"] = _read_stages(entries)
    found.unread += _unread(entries)
    found.num_read = sum(name.startswith(("parallelism.", "training.")) for name in entries) - len(found.unread)
    if pp > 1 and int(batch) > 0:
        job["local_batch_size"] = int(local)
    return found


def _sharding(entries: Mapping[str, Any], pp: int) -> str:
    if int(entries.get("parallelism.data_parallel_shard_degree", -1)) == 1:
        return "none"
    policy = entries.get("parallelism.fsdp_reshard_after_forward", "default")
    return "gradients" if policy == "never" or (policy == "default" and pp > 1) else "parameters"


def _sequence_parallel(entries: Mapping[str, Any]) -> bool:
    return not entries.get("parallelism.no_enable_sequence_parallel") and bool(
        entries.get("parallelism.enable_sequence_parallel", True)
    )


def _unread(entries: Mapping[str, Any]) -> Iterator[Unread]:
    for name, (effect, assumed) in _EFFECTS.items():
        if (value := entries.get(name, assumed)) not in (assumed, None, ""):
            yield Unread(name, str(value), effect)
    replicas = int(entries.get("parallelism.data_parallel_replicate_degree", 1))
    if replicas > 1 and int(entries.get("parallelism.data_parallel_shard_degree", -1)) != 1:
        yield Unread("parallelism.data_parallel_replicate_degree", str(replicas), "step and memory")


def _checkpointing(table: Any) -> str:
    """Return the kind of activation checkpointing by the fields of its configuration."""
    if table is None:
        return "none"
    return (
        "selective"
        if "force_recompute_mm_shapes_by_fqns" in table
        else "memory-budget"
        if "memory_budget" in table
        else "full"
    )


def _value(text: str) -> Any:
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else {"True": True, "False": False}.get(text, text)


def _read_stages(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the stages of a model: they follow once its layers are known."""
    first, last = (
        int(entries.get(f"parallelism.pipeline_parallel_{end}_stage_less_layers", 1)) for end in ("first", "last")
    )
    return {
        "class": str(entries.get("parallelism.pipeline_parallel_schedule", "1F1B")),
        "each": entries.get("parallelism.pipeline_parallel_layers_per_stage"),
        "first": first,
        "last": last,
    }


def resolve(found: Described, blocks: str, num_gpus: int) -> None:
    """Put the schedule and the stages into a description, by the model's blocks, and check the batch.

    Raises:
        ValueError: the class is no schedule here, or the layers give no stages.

    """
    job = found.job
    given, pp = job.pop("stages"), job["pp"]
    local = job.pop("local_batch_size", None)
    if pp == 1:
        job["schedule"] = default_schedule()
        return
    job["schedule"] = schedule_of(given["class"], TITLE, "parallelism.pipeline_parallel_schedule")
    layers = blocks.count("t") + blocks.count("d") + given["first"] + given["last"]
    chunks = family(job["schedule"]).vpps or (_TWO_STAGES,)
    stages = -(-layers // int(given["each"])) if given["each"] else pp * chunks[0]
    if stages % pp:
        raise ValueError(
            f"{TITLE}: {layers} layers (embedding and head as {given['first']} and {given['last']}), "
            f"{given['each']} on a stage, make {stages} stages, not divisible by pipeline_parallel_degree ({pp})"
        )
    job["vpp"] = stages // pp
    job["layout"] = _cut(blocks, stages, given["first"], given["last"])
    if job["layout"] is None:
        raise ValueError(f"{TITLE}: a stage would be without layers; take fewer stages than {stages}")
    dp = num_gpus // (pp * job["tp"] * job["cp"])
    if local is not None and dp and local * dp < job["global_batch_size"]:
        found.notes.append(
            f"a step is {job['global_batch_size'] // (local * dp)} pipelines one after the other (gradient "
            "accumulation); the estimate is of one with all micro-batches"
        )
