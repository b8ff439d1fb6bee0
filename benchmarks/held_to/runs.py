"""Published training runs as jobs: what each row says, the layout that its recipe has, and its seconds a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from held_to.rows import read_rows
from treadle.estimate import Cluster, Job, ModelShape, load_cluster, load_model
from treadle.estimate.constants import MeasuredRun


def title(run: MeasuredRun) -> str:
    """Return a run in a few words."""
    job = run.job
    cut = f"tp{job.tp} cp{job.cp} pp{job.pp} vpp{job.vpp} ep{job.ep} mbs{job.micro_batch_size}"
    return f"{run.software} {job.model.name} {job.cluster.num_gpus} {run.gpu} {job.precision} {cut}"


@cache
def model_of(name: str) -> ModelShape:
    """Return a preset's shape."""
    return load_model(name)


@cache
def cluster_of(name: str) -> Cluster:
    """Return a preset's cluster without its constants, which were fitted on these rows."""
    return replace(load_cluster(name), efficiency={})


def layout_of(model: ModelShape, num_stages: int) -> tuple[str, ...] | None:
    """Return the layout that recipes use where layers do not divide; None where they do.

    Embedding and head count as a layer each if that divides (Megatron's account_for_*_in_pipeline_split); otherwise all
    stages but the last are equally deep.
    """
    layers, blocks = model.num_hidden_layers, model.blocks
    if layers % num_stages == 0:
        return None
    if (layers + 2) % num_stages == 0:
        depth = (layers + 2) // num_stages
        return tuple(blocks[at : at + depth] for at in range(0, len(blocks), depth))
    depth = -(-layers // num_stages)
    stages = [blocks[1 + at : 1 + at + depth] for at in range(0, depth * (num_stages - 1), depth)]
    return "E" + stages[0], *stages[1:], blocks[1 + depth * (num_stages - 1) :]


def job_of(row: Mapping[str, str], model: str) -> Job:
    """Return the job of a row."""
    shape, number = model_of(model), {key: int(row[key]) for key in ("tp", "cp", "pp", "vpp", "mbs", "gbs", "seq")}
    graph = row.get("cuda_graph", "none")
    return Job(
        shape,
        cluster_of(f"{row['gpu']}:{row['gpus']}"),
        tp=number["tp"],
        cp=number["cp"],
        pp=number["pp"],
        vpp=number["vpp"],
        ep=int(row.get("ep", "1")),
        micro_batch_size=number["mbs"],
        global_batch_size=number["gbs"],
        seq_len=number["seq"],
        precision=row["precision"],
        schedule="interleaved" if number["vpp"] > 1 else "1f1b",
        layout=layout_of(shape, number["pp"] * number["vpp"]),
        recompute=_recompute(row, shape),
        recompute_layers=int(row.get("recompute_layers", "0")),
        cuda_graph="none" if graph == "router" else graph,
        a2a_overlap=row.get("a2a_overlap") == "true",
        sharding="parameters" if "fsdp" in row.get("note", "") else "optimizer",
    )


def _recompute(row: Mapping[str, str], shape: ModelShape) -> tuple[str, ...]:
    """Megatron's module mlp is the MLP of dense layers: of next to none in a model with experts."""
    named = row.get("recompute", "").split()
    if int(row.get("recompute_layers", "0")):
        named.append("full")
    return tuple(name for name in named if not (shape.is_moe and name == "mlp"))


@cache
def bridge_runs() -> tuple[MeasuredRun, ...]:
    """Return the runs of Megatron-Bridge's performance summaries."""
    return tuple(_bridge_run(row) for row in read_rows("bridge"))


def _bridge_run(row: Mapping[str, str]) -> MeasuredRun:
    job = job_of(row, row["model"])
    tokens = job.global_batch_size * job.seq_len / job.cluster.num_gpus
    flags = [row["dispatcher"], *row["note"].split(), "router graphs" if row["cuda_graph"] == "router" else ""]
    return MeasuredRun(
        job,
        tokens / float(row["tokens_per_s_per_gpu"]),
        row["release"],
        tuple(flag for flag in flags if flag),
        int(row["offload_layers"]),
    )


@cache
def mlperf_runs() -> tuple[MeasuredRun, ...]:
    """Return the runs of MLPerf Training's Llama 3.1 405B."""
    return tuple(
        MeasuredRun(
            job_of(row, "llama3-405b"),
            float(row["step_s"]),
            f"{row['round']} {row['submitter']} {row['system']}",
            ("fp8 attention",) if row["fp8_attention"] == "true" else (),
        )
        for row in read_rows("mlperf")
    )
