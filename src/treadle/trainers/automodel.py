"""NeMo AutoModel: the YAML of a recipe, read and written. It names its model, as Hugging Face does."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from treadle.estimate import Job
from treadle.passes.cut import cut_evenly
from treadle.schedules import default_schedule, family
from treadle.trainers.job_description import Described, Unread
from treadle.trainers.pipelining_class import class_of, lacking, schedule_of
from treadle.trainers.yaml_text import dotted, nested, parse_yaml, write_yaml

TITLE = "NeMo AutoModel"
_PARALLEL = {f"distributed.{name}_size": name for name in ("tp", "cp", "pp", "ep")}
_PIPELINE = "distributed.pipeline"
_PARTS = f"{_PIPELINE}.module_fqns_per_model_part"
NAMES = {field: entry for entry, field in _PARALLEL.items()} | {
    "micro_batch_size": f"{_PIPELINE}.pp_microbatch_size",
    "global_batch_size": "step_scheduler.global_batch_size",
    "seq_len": "dataset.seq_len",
    "vpp": f"stages per rank ({_PIPELINE}.layers_per_stage)",
    "layout": _PARTS,
    "num_hidden_layers": "the number of layers",
}
SHARDINGS = ("parameters", "none")
_STRATEGIES = {"fsdp2": "parameters", "megatron_fsdp": "parameters", "ddp": "none"}
_HUGGING_FACE = {
    "DeepSeek-V3": "deepseek-v3",
    "Kimi-K2-Instruct": "kimi-k2",
    "Llama-3.1-8B": "llama3-8b",
    "Llama-3.1-70B": "llama3-70b",
    "Llama-3.1-405B": "llama3-405b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "gpt-oss-120b": "gpt-oss-120b",
}
_UNMODELLED = {
    "distributed.dp_replicate_size": "step and memory",
    "distributed.defer_fsdp_grad_sync": "step and memory",
    "distributed.pipeline.pp_schedule_csv": "step and memory",
    "distributed.pipeline.round_virtual_stages_to_pp_multiple": "step and memory",
    "distributed.pipeline.pp_recv_buffer_pool": "memory",
    "peft._target_": "step and memory",
    "fp8.enabled": "step and memory",
    "compile.enabled": "step",
    "model.backend.te_fp8.recipe": "step and memory",
    "packed_sequence.packed_sequence_size": "step and memory",
    "benchmark.fake_balanced_gate": "step",
}


def settings(job: Job) -> dict[str, str]:
    """Return the entries of a job by their dotted names, as text.

    Raises:
        ValueError: AutoModel cannot run the job.

    """
    return {name: str(value) for name, value in _entries(job).items()}


def launch(job: Job) -> str:
    """Return the YAML of a job: to be put over that of a recipe, whose dataset and optimizer stay."""
    head = f"# {job.model.name} on {job.cluster.name}, for NeMo AutoModel. Dataset and optimizer are the recipe's.\n"
    return head + write_yaml(nested(_entries(job)))


def read(text: str) -> Described | None:
    """Return the job that a recipe's YAML describes, or None if the text is none."""
    table = parse_yaml(text) if re.search(r"^distributed:", text, re.MULTILINE) else None
    if table is None or not isinstance(table.get("distributed"), dict):
        return None
    entries = dotted(table)
    found = Described(model=_model(entries))
    job = found.job
    job |= {field: int(entries.get(entry) or 1) for entry, field in _PARALLEL.items()}
    local = int(entries.get("step_scheduler.local_batch_size") or 1)
    pipelined = job["pp"] > 1
    job["micro_batch_size"] = int(entries.get(f"{_PIPELINE}.pp_microbatch_size") or 1) if pipelined else local
    if batch := entries.get("step_scheduler.global_batch_size"):
        job["global_batch_size"] = int(batch)
    lengths = [entries.get(name) for name in ("dataset.seq_len", "dataset.seq_length", "pp_seq_len")]
    if (length := next((int(each) for each in lengths if each), None)) is not None:
        job["seq_len"] = length
    else:
        found.notes.append(f"the length of sequences is not in the file; taken as {Job.seq_len:,}")
    job["sequence_parallel"] = job["tp"] == 1 or bool(entries.get("distributed.sequence_parallel"))
    strategy = str(entries.get("distributed.strategy", "fsdp2"))
    job["sharding"] = _STRATEGIES.get(strategy, "parameters")
    job["recompute"] = ("full",) if entries.get("distributed.activation_checkpointing") else ()
    job["stages"] = {
        "class": str(entries.get(f"{_PIPELINE}.pp_schedule", "1F1B")),
        "each": entries.get(f"{_PIPELINE}.layers_per_stage"),
        "parts": entries.get(_PARTS),
    }
    for name, effect in _UNMODELLED.items():
        if entries.get(name):
            found.unread.append(Unread(name, str(entries[name]), effect))
    sections = ("distributed.", "step_scheduler.", "dataset.seq")
    found.num_read = sum(name.startswith(sections) for name in entries) - len(found.unread)
    return found


def resolve(found: Described, blocks: str, num_gpus: int) -> None:
    """Put the schedule and the stages into a description, by the model's blocks.

    Raises:
        ValueError: the schedule is none here, or the layers give no stages.

    """
    job, pp = found.job, found.job["pp"]
    given = job.pop("stages")
    if pp == 1:
        job["schedule"] = default_schedule()
        return
    job["schedule"] = schedule_of(given["class"], TITLE, f"{_PIPELINE}.pp_schedule")
    layers = len(re.findall("[td]", blocks))
    if given["parts"]:
        job["layout"] = _read_parts(given["parts"], blocks)
        stages = len(job["layout"])
    else:
        chunks = family(job["schedule"]).vpps or (2,)
        stages = math.ceil(layers / int(given["each"])) if given["each"] else pp * chunks[0]
    if stages % pp:
        raise ValueError(f"{TITLE}: {layers} layers make {stages} stages, not divisible by distributed.pp_size ({pp})")
    job["vpp"] = stages // pp


def _model(entries: Mapping[str, Any]) -> str:
    keys = ("model.config.pretrained_model_name_or_path", "model.pretrained_model_name_or_path", "model.config")
    given = str(next((entries[key] for key in keys if entries.get(key)), ""))
    name = given.rpartition("/")[2]
    return _HUGGING_FACE.get(name, name.lower())


def _entries(job: Job) -> dict[str, Any]:
    reason = lacking(job, SHARDINGS)
    if reason is None and job.cuda_graph != "none":
        reason = f"it has no CUDA graphs, got {job.cuda_graph}"
    if reason is not None:
        raise ValueError(f"{TITLE}: {reason}")
    strategy = next(name for name, sharding in _STRATEGIES.items() if sharding == job.sharding)
    found: dict[str, Any] = {
        "step_scheduler.global_batch_size": job.global_batch_size,
        "step_scheduler.local_batch_size": job.global_batch_size // job.dp if job.pp > 1 else job.micro_batch_size,
        "distributed.strategy": strategy,
        **{entry: getattr(job, field) for entry, field in _PARALLEL.items()},
        "distributed.sequence_parallel": job.tp > 1 and job.sequence_parallel,
        "distributed.activation_checkpointing": bool(job.recompute),
    }
    if job.pp > 1:
        found[f"{_PIPELINE}.pp_schedule"] = class_of(job.schedule)
        found[f"{_PIPELINE}.pp_microbatch_size"] = job.micro_batch_size
        found |= _stages(job)
    name = next((name for name, preset in _HUGGING_FACE.items() if preset == job.model.name), None)
    found |= {"model.pretrained_model_name_or_path": name} if name is not None else {}
    return {**found, "dataset.seq_len": job.seq_len}


def _stages(job: Job) -> dict[str, Any]:
    layers, stages = job.model.num_hidden_layers, job.num_stages
    if job.layout is None or (layers % stages == 0 and job.layout == cut_evenly(job.model.blocks, stages)):
        return {f"{_PIPELINE}.layers_per_stage": math.ceil(layers / stages)}
    if job.model.num_nextn_predict_layers:
        raise ValueError(f"{TITLE}: stages of a model with MTP are even in layers; take another --vpp or --pp")
    return {_PARTS: list(_parts(job.layout))}


def _parts(layout: tuple[str, ...]) -> list[list[str]]:
    """Return the modules of each stage by their names in Hugging Face's models."""
    parts, layer = [], 0
    for row in layout:
        names = ["model.embed_tokens"] * row.count("E")
        count = len(re.findall("[td]", row))
        names += [f"model.layers.{number}" for number in range(layer, layer + count)]
        layer += count
        parts.append(names + ["model.norm", "lm_head"] * row.count("L"))
    return parts


def _read_parts(parts: list[list[str]], blocks: str) -> tuple[str, ...]:
    """Return the stages of lists of modules."""
    rows = ["t" * sum(".layers." in f".{name}." for name in part) for part in parts]
    rows[0], rows[-1] = "E" + rows[0], rows[-1] + "m" * blocks.count("m") + "L"
    return tuple(rows)
