"""Measured runs from a CSV file: a line a run, with the columns of `run_columns.py`; lines with # are comments."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from treadle.calibrate.run_columns import COLUMNS, REQUIRED, SIZES, Cell
from treadle.estimate import Cluster, Job, load_model
from treadle.estimate.job import GRADIENT_BYTES
from treadle.estimate.job_stages import stage_rows
from treadle.fields.input_files import read_text
from treadle.fields.nearest import did_you_mean
from treadle.ir.blocks import parse_layout
from treadle.planner.job_estimate import describe
from treadle.planner.space import check_schedule
from treadle.schedules import default_schedule, family


class MeasuredRun(NamedTuple):
    """A job that was run, its seconds a step, what it is called, and its line in the file."""

    job: Job
    seconds: float
    name: str
    line: int


def read_runs(path: str | Path, cluster: Cluster) -> tuple[MeasuredRun, ...]:
    """Read measured runs on GPUs of a cluster.

    Args:
        path: a CSV file with a header.
        cluster: whose GPUs they ran on; a run may have fewer of them.

    Returns:
        The runs, in the order of the file.

    Raises:
        ValueError: there is no file, no run, or one makes no sense; the message names line, column and the way out.

    """
    file = Path(path)
    lines = [(number, row) for number, row in _rows(read_text(file)) if row and not row[0].lstrip().startswith("#")]
    if not lines:
        raise ValueError(
            f"{file} is empty; its first line names columns: {', '.join(REQUIRED)}, global_batch_size, ..."
        )
    header = _header(file, *lines[0])
    if len(lines) == 1:
        raise ValueError(f"{file} has a header and no run; write a line for each run that you measured")
    return tuple(_run(file, number, _cells(file, number, header, row), cluster) for number, row in lines[1:])


def _rows(text: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(text.splitlines(), skipinitialspace=True)
    for row in reader:
        yield reader.line_num, [cell.strip() for cell in row]


def _header(file: Path, line: int, names: list[str]) -> list[str]:
    for name in names:
        if name not in COLUMNS:
            raise ValueError(f"{file}:{line}: {name!r} is no column; {did_you_mean(name, COLUMNS)}")
        if names.count(name) > 1:
            raise ValueError(f"{file}:{line}: column {name} is there twice; leave one")
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise ValueError(f"{file}:{line}: column {missing[0]} is missing: {COLUMNS[missing[0]]}")
    batches = [name for name in ("global_batch_size", "tokens_per_batch") if name in names]
    if len(batches) != 1:
        got = "both" if batches else "neither"
        raise ValueError(f"{file}:{line}: a batch is global_batch_size or tokens_per_batch, got {got}")
    return names


def _cells(file: Path, line: int, header: list[str], row: list[str]) -> dict[str, Cell]:
    """Return the cells that are not empty."""
    if len(row) != len(header):
        raise ValueError(f"{file}:{line}: it has {len(row)} cells, and the header {len(header)} columns")
    cells = {name: Cell(str(file), line, name, text) for name, text in zip(header, row, strict=True)}
    for name in (*REQUIRED, "global_batch_size", "tokens_per_batch"):
        if name in cells and not cells[name].text:
            raise cells[name].refuse(COLUMNS[name])
    return {name: cell for name, cell in cells.items() if cell.text}


def _run(file: Path, line: int, cells: Mapping[str, Cell], cluster: Cluster) -> MeasuredRun:
    seconds, gpus = cells["step_s"].seconds(), _cluster(cells, cluster)
    numbers = {name: cells[name].whole() for name in SIZES if name in cells}
    numbers.pop("num_gpus", None)
    if "tokens_per_batch" in cells:
        numbers["global_batch_size"] = _sequences(cells["tokens_per_batch"], numbers.get("seq_len", Job.seq_len))
    try:
        job = _job(file, cells, numbers, gpus)
    except ValueError as error:
        raise error if str(error).startswith(f"{file}:") else ValueError(f"{file}:{line}: {error}") from error
    name = cells["name"].text if "name" in cells else f"{job.model.name} {gpus.num_gpus:,} GPUs {describe(job)}"
    return MeasuredRun(job, seconds, name, line)


def _cluster(cells: Mapping[str, Cell], cluster: Cluster) -> Cluster:
    if "gpu" in cells and cells["gpu"].text.lower() != cluster.gpu:
        kind = cluster.gpu or cluster.name
        raise cells["gpu"].refuse(f"the cluster's GPU, {kind}; keep runs of each GPU in a file of their own")
    if "num_gpus" not in cells:
        return cluster
    number = cells["num_gpus"].whole()
    if number > cluster.num_gpus:
        larger = f"--cluster {cluster.gpu}:{number}" if cluster.gpu else "a larger cluster"
        raise cells["num_gpus"].refuse(f"at most the {cluster.num_gpus:,} GPUs of the cluster ({larger} has more)")
    return replace(cluster, num_gpus=number)


def _sequences(cell: Cell, seq_len: int) -> int:
    tokens = cell.whole()
    if tokens % seq_len:
        raise cell.refuse(f"a multiple of seq_len, {seq_len:,}")
    return tokens // seq_len


def _job(file: Path, cells: Mapping[str, Cell], given: dict[str, Any], cluster: Cluster) -> Job:
    near_file = file.parent / cells["model"].text
    model = load_model(near_file if near_file.exists() else cells["model"].text)
    schedule = family(cells["schedule"].text if "schedule" in cells else default_schedule(given.get("vpp", 1)))
    given = {"vpp": schedule.default_vpp, **given}
    given |= {name: cells[name].text for name in ("precision", "cuda_graph", "sharding", "dispatch") if name in cells}
    given |= {name: tuple(cells[name].text.split()) for name in ("recompute", "offload") if name in cells}
    if "gradients" in cells:
        given["gradient_bytes"] = GRADIENT_BYTES.get(cells["gradients"].text)
        if given["gradient_bytes"] is None:
            raise cells["gradients"].refuse(" or ".join(GRADIENT_BYTES))
    if "recompute_layers" in cells:
        given["recompute_layers"] = cells["recompute_layers"].whole(0)
    if "layout" in cells:
        given["layout"] = parse_layout(cells["layout"].text)
    job = Job(model, cluster, schedule=schedule.name, **given)
    check_schedule(job)
    cluster.peak(job.precision)
    return replace(job, layout=stage_rows(job))
