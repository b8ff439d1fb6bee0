"""Peak memory of 43 runs that SimuMax published: Megatron-LM on 8 B200. No constant is fitted.

A row is the largest of all GPUs. Where a pipeline has two stages, both are held to their own measurement in `stages`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from held_to.rows import Prediction, read_rows, spread
from treadle.estimate import Job, ModelShape, load_cluster, load_model
from treadle.estimate.job_memory import MemoryEstimate, MemoryOptions, estimate_memory

GIB = 1 << 30
MIB = 1 << 20

_RUN_AS: dict[str, dict[str, Any]] = {
    "llama3-405b": {"num_key_value_heads": 16},
    "deepseek-v3": {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
}
"""What the launch scripts changed in a model, besides its layers and the tokenizer's row."""


def model_of(row: dict[str, str]) -> ModelShape:
    """Return the model that was run."""
    shape = load_model(row["model"])
    ran = replace(shape, num_hidden_layers=int(row["layers"]), vocab_size=shape.vocab_size + 1)
    return replace(ran, **_RUN_AS.get(row["model"], {}))


def job_of(row: dict[str, str]) -> Job:
    """Return the job of a row."""
    return Job(
        model_of(row),
        load_cluster("b200:8"),
        tp=int(row["tp"]),
        cp=int(row["cp"]),
        pp=int(row["pp"]),
        ep=int(row["ep"]),
        global_batch_size=int(row["num_microbatches"]) * int(row["dp"]),
        seq_len=int(row["seq_len"]),
    )


def memory_of(row: dict[str, str]) -> tuple[MemoryEstimate, ...]:
    """Return the predicted memory of each stage."""
    return estimate_memory(job_of(row), MemoryOptions(cp_comm_type="a2a"))


def predictions() -> list[Prediction]:
    """Return the largest rank of each row, in GiB."""
    return [
        Prediction(row["case"], max(rank.total for rank in memory_of(row)) / GIB, float(row["gib"]))
        for row in read_rows("simumax")
    ]


def stages() -> list[Prediction]:
    """Return both stages of each row with two, in MiB."""
    found = []
    for row in read_rows("simumax"):
        if row["last_stage_mib"]:
            first, last = memory_of(row)
            found.append(Prediction(f"{row['case']} first", first.total / MIB, float(row["first_stage_mib"])))
            found.append(Prediction(f"{row['case']} last", last.total / MIB, float(row["last_stage_mib"])))
    return found


def run() -> dict[str, float]:
    """Return median and largest absolute error, in percent."""
    errors = spread(predictions())
    return {"simumax_memory_median": 100 * errors["median"], "simumax_memory_max": 100 * errors["max"]}
