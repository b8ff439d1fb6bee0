"""A plan in one call: from a model and a cluster to the best job and the front."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from treadle.estimate import Cluster, ModelShape, load_cluster, load_model
from treadle.estimate.cluster import GIB
from treadle.estimate.job_memory import OUTSIDE_BYTES, RESERVED_OVER_ALLOCATED
from treadle.planner.alternatives import with_alternatives, with_graphs
from treadle.planner.narrowed import Progress
from treadle.planner.ranked_search import OnBetter, SearchResult, search
from treadle.planner.space import Candidate, SearchSpace, candidates, fill

TOKENS_PER_GPU = 32_768
"""Tokens of a batch for each GPU where nobody says: what Kimi K2 (67M tokens) has on 2,048 GPUs."""

_REASONS = 3
"""Reasons that are told where nothing goes together."""

_BALANCED = SearchSpace(balanced=(True,))


def find_plan(
    model: ModelShape | str | Path,
    cluster: Cluster | str | Path,
    *,
    tokens_per_batch: int | None = None,
    seq_len: int = 4096,
    memory_limit: int | None = None,
    space: SearchSpace = _BALANCED,
    progress: Progress | None = None,
    on_better: OnBetter | None = None,
) -> SearchResult:
    """Find a way to train a model on a cluster: simple, fitting into memory, and as fast as the estimate can tell.

    Args:
        model: its shape, or what `load_model` takes: a preset, a config.json, a TOML file.
        cluster: or what `load_cluster` takes: a preset with a number of GPUs, a TOML file.
        tokens_per_batch: of a step, over all GPUs; None for 32,768 a GPU.
        seq_len: tokens of a sequence.
        memory_limit: bytes that a GPU may hold; None for what CUDA, NCCL and torch's allocator leave.
        space: the values of each knob.
        progress: called with the candidates done, and all of them.
        on_better: in searches of many candidates called with each better result, without alternatives.

    Returns:
        The advised job, with the best ones that differ in one knob; the fastest; the front of time and memory; and all
        that was considered.

    Raises:
        ValueError: there is no such preset, sizes do not divide, or nothing fits; the message says the way out.

    Example:
        >>> space = SearchSpace(tp=(2,), pp=(2,), schedules=("1f1b", "zb-h1"), micro_batch_size=(1,), recompute=((),))
        >>> found = find_plan("llama3-8b", "h100:16", space=space)
        >>> found.best.job.dp, found.best.memory_bytes < 80 * 2**30
        (4, True)

    """
    shape = model if isinstance(model, ModelShape) else load_model(model)
    gpus = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    for precision in space.precision:
        gpus.peak(precision)
    tokens = tokens_per_batch if tokens_per_batch is not None else TOKENS_PER_GPU * gpus.num_gpus
    if seq_len < 1:
        raise ValueError(f"a sequence has at least 1 token, got {seq_len}")
    if tokens < seq_len:
        raise ValueError(f"a batch has at least one sequence of {seq_len} tokens, got {tokens} tokens")
    if tokens_per_batch is not None and tokens % seq_len:
        less = tokens - tokens % seq_len
        raise ValueError(
            f"a batch has whole sequences of {seq_len:,} tokens, got {tokens:,} tokens; take {less:,} or "
            f"{less + seq_len:,}, or another sequence length{_binary(tokens, seq_len)}"
        )
    limit = memory_limit if memory_limit is not None else usable_bytes(gpus)
    if limit > gpus.memory_bytes:
        raise ValueError(
            f"a GPU of {gpus.name} has {gpus.memory_bytes / GIB:.1f} GiB, got a limit of {limit / GIB:.1f}; for "
            "another GPU write a cluster file with its memory_gib"
        )
    refused: Counter[str] = Counter()
    batch = tokens // seq_len
    points = list(candidates(shape, gpus, space, global_batch_size=batch, seq_len=seq_len, refused=refused))
    if not points:
        reasons = "; ".join(reason for reason, _ in refused.most_common(_REASONS))
        raise ValueError(
            f"no valid parallelism for a global batch of {batch:,} sequences of {seq_len:,} tokens: {reasons}"
        )
    names = fill(space, shape, gpus, seq_len).schedules or ()
    found = search(points, limit, offload=space.offload is None, progress=progress, on_better=on_better)
    found = with_alternatives(found, points)
    if space.cuda_graph is None:
        found = with_graphs(found)
    return replace(found, unable=tuple(_unable(names, points, refused)))


def _binary(tokens: int, seq_len: int) -> str:
    """Return words about the count with a binary prefix, if a decimal one was meant to be that: 4M is not 4Mi."""
    for prefix, decimal, binary in (("G", 10**9, 2**30), ("M", 10**6, 2**20), ("K", 10**3, 2**10)):
        if tokens % decimal == 0 and tokens // decimal * binary % seq_len == 0:
            return f"; {tokens // decimal}{prefix}i are {tokens // decimal * binary:,}"
    return ""


def _unable(names: Iterable[str], points: Iterable[Candidate], refused: Counter[str]) -> Iterator[tuple[str, str]]:
    """Yield the schedules that have no candidate, each with the reason that was met most often."""
    able = {point.job.schedule for point in points}
    for name in names:
        reason = next((text for text, _ in refused.most_common() if text.startswith(f"{name} ")), None)
        if name not in able and reason is not None:
            yield name, reason.removeprefix(f"{name} ")


def usable_bytes(cluster: Cluster) -> int:
    """Return the bytes that tensors may take on a GPU: without CUDA, NCCL, and what torch's allocator reserves."""
    return int((cluster.memory_bytes - OUTSIDE_BYTES) / RESERVED_OVER_ALLOCATED)
