"""Published runs beside what `treadle plan` prints for them: the simulated step and the memory, with shipped presets.

Nothing is fitted here: `benchmarks/fit_presets.py` fitted the presets, to Megatron-Bridge and SimuMax.

- Megatron-Bridge: recipes as published.
- MLPerf Llama 3.1 405B: embedding and head count as a layer each.
- SimuMax: BF16 on one host. Its context parallelism is by all-to-all, which a plan takes for a ring.
- The zero-bubble paper: pipelines alone, 1F1B and interleaved 1F1B. Heads are taken to be 128 wide.
- vTrain: whole layers recomputed, no sequence parallelism, attention that is not fused.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

from held_to import simumax_memory
from held_to.rows import Prediction, read_rows
from held_to.runs import PublishedRun, bridge_runs, mlperf_runs
from treadle.calibrate.calibration import planned
from treadle.estimate import Job, ModelShape, load_cluster, load_model
from treadle.estimate.job_stages import stage_rows
from treadle.planner.find_plan import usable_bytes

EXACT_FROM = "26.02"
"""Recipes of older releases are not known exactly."""
APART = 1.05
"""Pairs of runs that are nearer to each other are not ranked."""

GIB = 1 << 30


@dataclass(frozen=True)
class Row:
    """A published run as a job of a plan."""

    name: str
    job: Job
    seconds: float
    release: str = ""
    """Of Megatron-Bridge."""

    @property
    def kind(self) -> str:
        """Dense or MoE."""
        return "MoE" if self.job.model.is_moe else "dense"

    @property
    def configuration(self) -> object:
        """What it shares with runs of the same model on the same GPUs, cut the same."""
        job = self.job
        cut = (job.tp, job.cp, job.pp, job.vpp, job.ep, job.micro_batch_size)
        return job.model.name, job.cluster.name, job.precision, job.seq_len, cut

    @property
    def prediction(self) -> Prediction:
        """The step that a plan prints, beside the measured one."""
        return Prediction(self.name, planned(self.job).step_s, self.seconds)

    @property
    def fits(self) -> bool:
        """False if a plan refuses the job, which ran, for its memory."""
        return planned(self.job).memory_bytes <= usable_bytes(self.job.cluster)

    def tokens_per_s(self, seconds: float) -> float:
        """Tokens a second and GPU in a step of so many seconds."""
        return self.job.global_batch_size * self.job.seq_len / self.job.cluster.num_gpus / seconds


def _rows(runs: Iterable[PublishedRun]) -> tuple[Row, ...]:
    return tuple(Row(run.title, run.job, run.seconds) for run in runs)


def _bridge(keep: Callable[[PublishedRun], bool], *, sharding: str = "optimizer") -> tuple[Row, ...]:
    runs = (run for run in bridge_runs() if run.job.sharding == sharding and keep(run))
    return tuple(Row(run.title, run.job, run.seconds, run.release) for run in runs)


def _gpt(hidden: int, heads: int, layers: int, seq_len: int, vocabulary: int) -> ModelShape:
    return replace(
        load_model("gpt3-175b"),
        name=f"gpt {layers} x {hidden}",
        hidden_size=hidden,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=seq_len,
    )


def _zero_bubble(schedule: str) -> Iterator[Row]:
    for row in read_rows("zero_bubble"):
        number = {key: int(row[key]) for key in ("layers", "hidden", "pp", "vpp", "num_microbatches")}
        batch = number["num_microbatches"] * int(row["micro_batch_size"])
        job = Job(
            _gpt(number["hidden"], number["hidden"] // 128, number["layers"], 1024, 50257),
            load_cluster(f"a100:{number['pp']}"),
            pp=number["pp"],
            vpp=number["vpp"] if schedule == "interleaved" else 1,
            micro_batch_size=int(row["micro_batch_size"]),
            global_batch_size=batch,
            seq_len=1024,
            schedule=schedule,
        )
        cut = _ends_as_layers(job)
        seconds = batch / number["pp"] / float(row[f"samples_{schedule}"])
        yield Row(f"{row['model']} M={number['num_microbatches']} {schedule}", cut, seconds)


def _ends_as_layers(job: Job) -> Job:
    """Return a job whose first and last stage have a layer less, as the paper cuts them."""
    blocks, depth = job.model.blocks, (job.model.num_hidden_layers + 2) // job.num_stages
    return replace(job, layout=tuple(blocks[at : at + depth] for at in range(0, len(blocks), depth)))


def _vtrain() -> Iterator[Row]:
    for row in read_rows("vtrain"):
        number = {key: int(value) for key, value in row.items() if key not in ("ms", "billion_parameters")}
        job = Job(
            _gpt(number["hidden"], number["heads"], number["layers"], number["seq_len"], 51200),
            load_cluster(f"a100:{number['gpus']}"),
            tp=number["tp"],
            pp=number["pp"],
            micro_batch_size=number["micro_batch_size"],
            global_batch_size=number["global_batch_size"],
            seq_len=number["seq_len"],
            recompute=("full",),
            sequence_parallel=False,
            sharding="none",
        )
        cut = f"TP{number['tp']} DP{number['dp']} PP{number['pp']} micro-batch {number['micro_batch_size']}"
        yield Row(f"{row['billion_parameters']}B {cut}", replace(job, layout=stage_rows(job)), float(row["ms"]) / 1000)


def _simumax() -> Iterator[Row]:
    for row in read_rows("simumax"):
        job = simumax_memory.job_of(row)
        yield Row(row["case"], replace(job, layout=stage_rows(job)), float(row["ms"]) / 1000)


@cache
def data_sets() -> Mapping[str, tuple[Row, ...]]:
    """Return the rows of each data set."""
    return {
        "bridge_dense": _bridge(lambda run: not run.job.model.is_moe and run.release >= EXACT_FROM),
        "bridge_dense_25": _bridge(lambda run: not run.job.model.is_moe and run.release < EXACT_FROM),
        "bridge_moe": _bridge(lambda run: run.job.model.is_moe),
        "bridge_fsdp": _bridge(lambda run: True, sharding="parameters"),
        "mlperf": _rows(mlperf_runs()),
        "simumax": tuple(_simumax()),
        "zb_1f1b": tuple(_zero_bubble("1f1b")),
        "zb_interleaved": tuple(_zero_bubble("interleaved")),
        "vtrain": tuple(_vtrain()),
    }


def memory_predictions() -> list[Prediction]:
    """Return SimuMax's runs with the memory that a plan prints, in GiB."""
    measured = [float(row["gib"]) for row in read_rows("simumax")]
    rows = data_sets()["simumax"]
    return [
        Prediction(row.name, planned(row.job).memory_bytes / GIB, each)
        for row, each in zip(rows, measured, strict=True)
    ]


def ranked(rows: Iterable[Row], alike: Callable[[Row], object]) -> tuple[int, int]:
    """Return how many pairs of rows that are alike, but not equally fast, are ranked right, and how many there are."""
    right = total = 0
    for one, other in combinations(rows, 2):
        measured = one.tokens_per_s(one.seconds) / other.tokens_per_s(other.seconds)
        if one.job == other.job or alike(one) != alike(other) or max(measured, 1 / measured) <= APART:
            continue
        printed = [row.tokens_per_s(row.prediction.predicted) for row in (one, other)]
        total += 1
        right += (printed[0] > printed[1]) == (measured > 1)
    return right, total


def same_machine(row: Row) -> object:
    """Return what two runs share of which the faster configuration is asked: model, GPUs, precision, sequences."""
    job = row.job
    return job.model.name, job.cluster.name, job.precision, job.seq_len


def regrets(rows: Iterable[Row]) -> dict[str, float]:
    """Return, for the runs of each machine, how much faster the measured best is than the one that a plan ranks first.

    Runs of one job count as one: their mean.
    """
    machines: dict[object, dict[Job, list[Row]]] = {}
    for row in rows:
        batch = row.job.global_batch_size * row.job.seq_len if not row.release else 0
        machines.setdefault((same_machine(row), batch), {}).setdefault(row.job, []).append(row)
    found = {}
    for jobs in machines.values():
        if len(jobs) > 1:
            measured = {
                job: statistics.fmean(row.tokens_per_s(row.seconds) for row in own) for job, own in jobs.items()
            }
            first = max(jobs, key=lambda job: jobs[job][0].tokens_per_s(planned(job).step_s))
            found[f"{jobs[first][0].name} of {len(jobs)}"] = max(measured.values()) / measured[first] - 1
    return found
