"""The space that is searched: every knob of a job and the values it may take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from treadle.estimate import Cluster, Job, ModelShape
from treadle.passes.cut import cut_evenly
from treadle.schedules import default_schedule, family, known
from treadle.trainers import TrainerFormat
from treadle.trainers.megatron import refusal

MOST_MICROBATCHES = 8_192
"""Of a replica in a step: what is shown is simulated whole."""
_CP_TOKENS, _CP_TOKENS_DENSE = 4_096, 2_048
"""Tokens of a sequence that context parallelism leaves a rank at least; the second for dense models on one host."""
_MOST_CP, _MOST_VPP = 16, 8


_CHOICES = (
    "recompute",
    "offload",
    "balanced",
    "cuda_graph",
    "precision",
    "gradient_bytes",
    "moment_bytes",
    "saved",
    "dispatch",
)
"""Knobs that leave a job's sizes as they are. None, of offload, is nothing."""

TRAINED_RECOMPUTE = ((), ("attn",), ("mlp",), ("attn", "mlp"))
"""What `treadle.train` recomputes: whole parts of a layer, which are ops of a Program."""


@dataclass(frozen=True)
class SearchSpace:
    """The values of each knob. None: those that make sense for the model and the cluster.

    Example:
        >>> SearchSpace(tp=(1, 2), pp=(4,), schedules=("1f1b",)).tp
        (1, 2)

    """

    tp: tuple[int, ...] | None = None
    cp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    vpp: tuple[int, ...] | None = None
    """None: 1, 2, 4, and up to 8 whatever divides the layers of a rank, or these with embedding and head as two."""

    ep: tuple[int, ...] | None = None
    micro_batch_size: tuple[int, ...] = (1, 2, 4, 8, 16)
    schedules: tuple[str, ...] | None = None
    recompute: tuple[tuple[str, ...], ...] | None = None
    """None: `recompute_sets` of the model."""

    offload: tuple[tuple[str, ...], ...] | None = None
    """Sets of modules. None: nothing is offloaded unless nothing fits otherwise, and then as little as does."""

    sharding: tuple[str, ...] | None = None
    """None: optimizer; of dense models without a pipeline also gradients (ZeRO-2) and parameters (FSDP)."""

    gradient_bytes: tuple[int, ...] = (4,)
    moment_bytes: tuple[int, ...] = (4,)
    saved: tuple[str, ...] = ("bf16",)
    layout: tuple[tuple[str, ...], ...] | None = None
    """Blocks of each stage, for the jobs with as many stages. None: as `balanced` has them."""

    balanced: tuple[bool, ...] = (False, True)
    """Stages as even in layers as can be (False), or cut so that the slowest is the fastest possible (True)."""

    cuda_graph: tuple[str, ...] | None = None
    """None: no graphs; what partial ones would change is an alternative of the chosen job."""

    precision: tuple[str, ...] = ("bf16",)
    dispatch: tuple[str, ...] = ("bf16",)
    trainer: TrainerFormat | None = None
    """Only jobs that this trainer can run."""


@dataclass(frozen=True)
class Candidate:
    """A job, and whether its stages are to be balanced: the layout of that follows from its costs."""

    job: Job
    balanced: bool = False


def candidates(
    model: ModelShape,
    cluster: Cluster,
    space: SearchSpace,
    *,
    global_batch_size: int,
    seq_len: int,
    refused: Counter[str] | None = None,
) -> Iterator[Candidate]:
    """Yield every job of a space whose sizes divide and whose schedule can do its micro-batches.

    `refused` counts, by reason, the sizes that do not go together.
    """
    reasons = refused if refused is not None else Counter()
    named = space.schedules is not None
    space = fill(space, model, cluster, seq_len)
    for tp, cp, pp, ep in product(space.tp or (), space.cp or (), space.pp or (), space.ep or ()):
        if cluster.num_gpus % (tp * cp * pp):
            reasons[f"tp x cp x pp = {tp} x {cp} x {pp} does not divide {cluster.num_gpus} GPUs"] += 1
            continue
        sharding = (
            space.sharding
            or (space.trainer and space.trainer.shardings)
            or _shardings(model, cluster.num_gpus // (tp * cp), pp)
        )
        for size, (name, vpp), cut, blocks in product(
            space.micro_batch_size, _schedules(space, model, pp, reasons), sharding, space.layout or (None,)
        ):
            try:
                first = Job(
                    model,
                    cluster,
                    tp=tp,
                    cp=cp,
                    pp=pp,
                    vpp=vpp,
                    ep=ep,
                    micro_batch_size=size,
                    global_batch_size=global_batch_size,
                    seq_len=seq_len,
                    schedule=name,
                    sharding=cut,
                    layout=blocks,
                )
                check_schedule(first)
            except ValueError as error:
                reasons[str(error)] += 1
                continue
            for each in _variations(first, space):
                reason = refusal(each.job, named=named) or _unable(each.job, space.trainer)
                if reason is None:
                    yield each
                else:
                    reasons[reason] += 1


def _unable(job: Job, trainer: TrainerFormat | None) -> str | None:
    """Return why a trainer cannot run a job; None if it can, or any may."""
    try:
        if trainer is not None:
            cut = cut_evenly(job.model.blocks, job.num_stages) if trainer.even_stages else None
            trainer.settings(replace(job, layout=job.layout or cut))
    except ValueError as error:
        return str(error)
    return None


def _variations(first: Job, space: SearchSpace) -> Iterator[Candidate]:
    """Yield a job with every choice that leaves its sizes as they are."""
    offered = (getattr(space, name) for name in _CHOICES)
    for values in product(*(each if each is not None else ((),) for each in offered)):
        chosen = dict(zip(_CHOICES, values, strict=True))
        balanced = chosen.pop("balanced")
        if balanced and first.pp * first.vpp == 1 and False in space.balanced:  # one stage has one layout
            continue
        yield Candidate(replace(first, **chosen), balanced)


def fill(space: SearchSpace, model: ModelShape, cluster: Cluster, seq_len: int) -> SearchSpace:
    """Return the space with values for the knobs that have none."""
    domain = min(cluster.nvlink_domain, cluster.num_gpus, 8)
    tp = [size for size in _powers(domain) if model.num_attention_heads % size == 0 == model.num_key_value_heads % size]
    alone = not model.is_moe and cluster.num_gpus <= cluster.nvlink_domain
    cp = _powers(max(1, min(_MOST_CP, seq_len // (_CP_TOKENS_DENSE if alone else _CP_TOKENS))))
    ep = [size for size in _powers(64) if model.num_experts % size == 0] if model.is_moe else [1]
    pp = [size for size in _powers(64) if size <= model.num_hidden_layers]
    filled = replace(
        space,
        tp=space.tp or tuple(tp),
        cp=space.cp or cp,
        pp=space.pp or tuple(pp),
        ep=space.ep or tuple(ep),
        schedules=space.schedules or searched_schedules(model),
        recompute=space.recompute or recompute_sets(model),
        cuda_graph=space.cuda_graph or (Job.cuda_graph,),
    )
    values = {field.name: getattr(filled, field.name) for field in fields(filled)}
    once: dict[str, Any] = {
        name: tuple(dict.fromkeys(each)) for name, each in values.items() if isinstance(each, tuple)
    }
    return replace(filled, **once)


def recompute_sets(model: ModelShape) -> tuple[tuple[str, ...], ...]:
    """Return the modules to recompute that make sense for a model, as Megatron names them.

    Each set holds the one before it, and the module that comes next frees fewer bytes for the time it takes; core_attn
    frees next to nothing where attention is fused, and is not among them.

    Example:
        >>> from treadle.estimate import load_model
        >>> recompute_sets(load_model("llama3-8b"))
        ((), ('layernorm',), ('layernorm', 'mlp'), ('full',))

    """
    small = ("layernorm", *(["mla_up_proj"] if model.is_mla else []))
    if not model.is_moe:
        return (), small, (*small, "mlp"), ("full",)
    acts = (*small, "moe_act")
    shared = [(*acts, "shared_experts")] if model.shared_width else []
    return (), small, acts, *shared, (*small, "moe"), ("full",)


def searched_schedules(model: ModelShape) -> tuple[str, ...]:
    """Return the schedules that are considered where none is named: those that a public trainer runs.

    Overlapped ones are last, and for models with experts alone.

    Example:
        >>> from treadle.estimate import load_model
        >>> searched_schedules(load_model("llama3-8b"))
        ('1f1b', 'interleaved', 'zb-h1', 'zb-v')

    """
    runnable = (each for each in known().values() if each.searched and each.trainers)
    found = [each for each in runnable if model.is_moe or not each.overlapped]
    return tuple(each.name for each in sorted(found, key=lambda each: each.overlapped))


def _shardings(model: ModelShape, num_ranks: int, pp: int) -> tuple[str, ...]:
    dense = pp == 1 < num_ranks and not model.is_moe
    return ("optimizer", "gradients", "parameters") if dense else ("optimizer",)


def numbers_of_chunks(model: ModelShape, pp: int) -> tuple[int, ...]:
    """Return the numbers of chunks that make sense for a pipeline of `pp` ranks."""
    layers = model.num_hidden_layers
    divide = {size for size in range(2, _MOST_VPP + 1) if 0 in (layers % (size * pp), (layers + 2) % (size * pp))}
    return tuple(sorted({1, 2, 4} | divide))


def _schedules(space: SearchSpace, model: ModelShape, pp: int, reasons: Counter[str]) -> Iterator[tuple[str, int]]:
    """Yield the schedules of a pipeline of `pp` ranks, each with its numbers of chunks."""
    names = space.schedules or ()
    if pp == 1:
        alone = [name for name in names if name == default_schedule() or overlaps_alone(name)]
        if not alone:
            reasons[f"a pipeline of one rank runs {default_schedule()}; add --schedule {default_schedule()}"] += 1
        yield from ((name, 1) for name in alone)
        return
    for name in names:
        vpps = family(name).vpps or tuple(count for count in space.vpp or numbers_of_chunks(model, pp) if count > 1)
        if not vpps:
            reasons[f"{name} has at least 2 chunks a rank; add --vpp 2"] += 1
        for vpp in vpps:
            yield name, vpp


def overlaps_alone(name: str) -> bool:
    """True if a schedule overlaps exchanges with the computation of another micro-batch on a single rank too."""
    return family(name).overlapped and not family(name).vpps


def check_schedule(job: Job) -> None:
    """Raise a ValueError if the schedule cannot do the job's size, or has more stages than the model has blocks.

    Embedding and head may be stages of their own.
    """
    chosen = family(job.schedule)
    stages = chosen.placement(job.pp, job.vpp).num_stages
    if stages > len(job.model.blocks):
        raise ValueError(
            f"{job.schedule} has {stages} stages, and the model {job.model.num_hidden_layers} layers, an embedding and "
            f"a head; take a smaller --pp or --vpp"
        )
    if job.layout is not None and len(job.layout) != stages:
        raise ValueError(
            f"{job.schedule} on {job.pp} ranks with {job.vpp} on each has {stages} stages, the layout {len(job.layout)}"
        )
    if job.num_microbatches > MOST_MICROBATCHES:
        raise ValueError(
            f"{job.num_microbatches:,} micro-batches a replica are more than {MOST_MICROBATCHES:,}; take a smaller "
            "batch, larger micro-batches or longer sequences"
        )
    chosen.size(job.pp, job.vpp, job.num_microbatches)


def _powers(most: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(most.bit_length()) if 1 << power <= most)
