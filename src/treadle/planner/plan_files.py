"""A plan as files that other commands take: schedule, costs and options, and a run of `treadle.train`."""

from __future__ import annotations

from pathlib import Path

from treadle.costs import dump as dump_costs
from treadle.estimate import Job, ModelShape
from treadle.fields.input_files import toml_value
from treadle.files import FORMATS
from treadle.ir.blocks import write_layout
from treadle.planner.plan_directory import COSTS, OPTIONS, SCHEDULE, options_toml
from treadle.planner.planned_step import PlannedStep

_TRAINED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "first_k_dense_replace",
    "num_nextn_predict_layers",
)
"""Fields of a model that `treadle.train` has under the same names."""


def write_files(chosen: PlannedStep, directory: Path) -> tuple[Path, ...]:
    """Write schedule.txt, costs.toml and plan.toml, and train.toml where `treadle.train` can run the job."""
    directory.mkdir(parents=True, exist_ok=True)
    made = {
        SCHEDULE: FORMATS["text"].dump(chosen.schedule),
        COSTS: dump_costs(chosen.estimate.costs, comments=True),
        OPTIONS: options_toml(chosen.estimate),
    }
    if untrainable(chosen.estimate.job) is None:
        made["train.toml"] = train_file(chosen.estimate.job, (directory / COSTS).resolve())
    else:
        (directory / "train.toml").unlink(missing_ok=True)  # of another plan
    for name, text in made.items():
        (directory / name).write_text(text, encoding="utf-8")
    return tuple(directory / name for name in made)


def untrainable(job: Job) -> str | None:
    """Say why `treadle.train` cannot run a job, or None where it can."""
    reasons = {
        f"it cuts by pp, ep and dp only, and this job has tp {job.tp} and cp {job.cp}": job.tp * job.cp > 1,
        f"its replicas hold whole expert groups, and ep {job.ep} does not divide dp {job.dp}": job.dp % job.ep > 0,
        f"it computes in bf16, and this job in {job.precision}": job.precision != "bf16",
        f"it recomputes attn and mlp, and this job {'+'.join(job.recompute)}": not {*job.recompute} <= {"attn", "mlp"},
        f"it cuts the optimizer over replicas, and this job its {job.sharding}": job.sharding != Job.sharding,
        "its moments are FP32, and this job's BF16": job.moment_bytes != Job.moment_bytes,
        "it saves activations in BF16, and this job in FP8": job.saved != Job.saved,
        "its gradients are FP32, and this job's BF16": job.gradient_bytes != Job.gradient_bytes,
    }
    return untrainable_model(job.model) or next((reason for reason, holds in reasons.items() if holds), None)


def untrainable_model(model: ModelShape) -> str | None:
    """Say why `treadle.train` cannot train a model, or None where it can."""
    reasons = {
        "its attention is grouped-query, and this model's is MLA": model.is_mla,
        "its shared experts are as wide as the others, and this model's are not": bool(
            model.shared_expert_intermediate_size
        ),
        "its MLPs are gated, and this model's are not": not model.gated_mlp,
        "its attention looks at all tokens, and this model's has a window": model.num_windowed_layers > 0,
        "its projections have no biases, and this model's have": model.attention_bias
        or model.qkv_bias
        or model.mlp_bias,
        f"its heads have an even width, and this model's {model.head_dim}": model.head_dim % 2 > 0,
        "its positions are rotary, and this model's are learned": model.max_position_embeddings > 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _dense(layout: tuple[str, ...]) -> tuple[str, ...]:
    """Return the layout of a dense model in the trainer's letters."""
    return tuple(row.replace("t", "d") for row in layout)


def train_file(job: Job, costs: Path) -> str:
    """Return the configuration of `treadle.train` for a job."""
    model = job.model
    sigmoid = model.n_shared_experts > 0
    fields = {name: getattr(model, name) for name in _TRAINED if model.is_moe or "expert" not in name}
    fields |= {"num_experts": model.num_experts, "tie_word_embeddings": model.tie_word_embeddings}
    if sigmoid:
        fields |= {"n_shared_experts": model.n_shared_experts, "scoring": "sigmoid"}
    assert job.layout is not None
    lines = [
        f"# {model.name} on {job.cluster.name}: torchrun ... -m treadle.train --config train.toml (--dry-run first).",
        "# The trainer's attention normalises queries and keys, as Qwen3's does, whatever the model was planned as.",
        f"output = {toml_value(f'runs/{model.name}')}",
        f"costs = {toml_value(str(costs))}",
        "",
        "[model]",
        *(f"{name} = {toml_value(value)}" for name, value in fields.items()),
        "",
        "[parallel]",
        f"pp = {job.pp}",
        f"ep = {job.ep}",
        f"dp = {job.dp // job.ep}",
        f'schedule = "{job.schedule}"',
        *([f"vpp = {job.vpp}"] if job.vpp > 1 else []),
        f'layout = "{write_layout(job.layout if model.is_moe else _dense(job.layout), dense=True)}"',
        f"recompute = {toml_value(job.recompute)}",
        f'saved = "{"offload" if job.offload else "leave"}"',
        "",
        "[training]",
        f"global_batch_size = {job.global_batch_size}",
        f"micro_batch_size = {job.micro_batch_size}",
        f"seq_len = {job.seq_len}",
        'dtype = "bfloat16"',
    ]
    return "\n".join(lines) + "\n"
