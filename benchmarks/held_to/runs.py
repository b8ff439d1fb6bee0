"""Published training runs as jobs of a plan: sizes and flags of each row, its recipe's layout, shipped constants.

Left out are runs with a known regression. Most of those with FSDP offload layers, which these jobs do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from held_to.rows import read_rows
from treadle.estimate import Job, ModelShape, load_cluster, load_model
from treadle.estimate.job_stages import stage_rows


@dataclass(frozen=True)
class PublishedRun:
    """A job that was run, its seconds a step, and the release or the submission that it is from."""

    job: Job
    seconds: float
    release: str

    @property
    def gpu(self) -> str:
        """The GPU's name."""
        return self.job.cluster.gpu

    @property
    def title(self) -> str:
        """The run in a few words."""
        job = self.job
        cut = f"tp{job.tp} cp{job.cp} pp{job.pp} vpp{job.vpp} ep{job.ep} mbs{job.micro_batch_size}"
        return f"{self.release} {job.model.name} {job.cluster.num_gpus} {self.gpu} {job.precision} {cut}"


@cache
def model_of(name: str) -> ModelShape:
    """Return a preset's shape."""
    return load_model(name)


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
    """Return the job of a row. Overlap of the all-to-all is a schedule's: in a pipeline with one chunk there is none.

    Gradients are BF16: the recipes turn grad_reduce_in_fp32 off.
    """
    shape, number = model_of(model), {key: int(row[key]) for key in ("tp", "cp", "pp", "vpp", "mbs", "gbs", "seq")}
    graph, schedule = row.get("cuda_graph", "none"), "interleaved" if number["vpp"] > 1 else "1f1b"
    if row.get("a2a_overlap") == "true" and (number["vpp"] > 1 or number["pp"] == 1):
        schedule = "interleaved-overlap"
    job = Job(
        shape,
        load_cluster(f"{row['gpu']}:{row['gpus']}"),
        tp=number["tp"],
        cp=number["cp"],
        pp=number["pp"],
        vpp=number["vpp"],
        ep=int(row.get("ep", "1")),
        micro_batch_size=number["mbs"],
        global_batch_size=number["gbs"],
        seq_len=number["seq"],
        precision=row["precision"],
        schedule=schedule,
        layout=layout_of(shape, number["pp"] * number["vpp"]),
        recompute=_recompute(row, shape),
        recompute_layers=int(row.get("recompute_layers", "0")),
        cuda_graph="none" if graph == "router" else graph,
        gradient_bytes=2,
    )
    return replace(job, layout=stage_rows(job))


def _recompute(row: Mapping[str, str], shape: ModelShape) -> tuple[str, ...]:
    """Megatron's module mlp is the MLP of dense layers: of next to none in a model with experts."""
    named = row.get("recompute", "").split()
    if int(row.get("recompute_layers", "0")):
        named.append("full")
    return tuple(name for name in named if not (shape.is_moe and name == "mlp"))


@cache
def bridge_runs() -> tuple[PublishedRun, ...]:
    """Return the runs of Megatron-Bridge's performance summaries."""
    return tuple(_bridge_runs())


def _bridge_runs() -> Iterator[PublishedRun]:
    for row in read_rows("bridge"):
        if "regression" in row["note"].split():
            continue
        sharding = "parameters" if "fsdp" in row["note"].split() else "optimizer"
        job = replace(job_of(row, row["model"]), sharding=sharding)
        tokens = job.global_batch_size * job.seq_len / job.cluster.num_gpus
        yield PublishedRun(job, tokens / float(row["tokens_per_s_per_gpu"]), row["release"])


@cache
def mlperf_runs() -> tuple[PublishedRun, ...]:
    """Return the runs of MLPerf Training's Llama 3.1 405B."""
    return tuple(
        PublishedRun(
            job_of(row, "llama3-405b"), float(row["step_s"]), f"{row['round']} {row['submitter']} {row['system']}"
        )
        for row in read_rows("mlperf")
    )
