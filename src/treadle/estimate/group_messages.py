"""Messages and collectives of a job: which ranks a group has, and the bytes that a GPU sends over NVLink and its NIC.

Ranks are numbered as Megatron numbers them: tp varies fastest, then cp, dp, pp (of experts: etp, ep, dp,
pp). That decides which groups stay inside an NVLink domain. Where two ranks of a pipeline hold the same stage
(DualPipe), the replicas of both are one group of dp.
"""

from __future__ import annotations

from collections.abc import Callable

from treadle.estimate.block_parts import BlockMessage
from treadle.estimate.job import Job
from treadle.estimate.model_cut import ModelCut
from treadle.estimate.work import BF16, GroupMessage

_GROUPS: dict[str, Callable[[Job], tuple[int, int]]] = {
    "tp": lambda job: (job.tp, 1),
    "etp": lambda job: (job.etp, 1),
    "cp": lambda job: (job.cp, job.tp),
    "ep": lambda job: (job.ep, job.etp),
    "dp": lambda job: (job.cp * job.dp, job.tp),
    "expert_dp": lambda job: (job.expert_dp, job.etp * job.ep),
    "pp": lambda job: (job.pp, job.tp * job.cp * job.dp),
}
"""Ranks of each group, of one rank of the pipeline, and how far apart they are."""

_HOLDERS = ("dp", "expert_dp")
"""Groups of all ranks that hold the same parameters."""


def group_of(job: Job, group: str) -> tuple[int, float]:
    """Return how many ranks a group has and how many of them share an NVLink domain.

    A group is spread evenly over as few domains as hold it: of 72 GPUs of a domain an ep of 128 uses 64.
    """
    size, stride = _GROUPS[group](job)
    domain = job.cluster.nvlink_domain
    pipes = job.placement.num_pipes if group in _HOLDERS else 1
    if pipes > 1 and job.cluster.num_gpus <= domain:
        return pipes * size, pipes * size
    return pipes * size, size / -(-size // max(1, domain // stride))


def gather(job: Job, group: str, size_bytes: float, collective: str = "all_gather") -> tuple[GroupMessage, ...]:
    """Return the all-gather or reduce-scatter of a tensor of `size_bytes`; nothing if the group has one rank.

    Over several domains each GPU exchanges its share over its own NIC, then all share inside the domain.
    """
    ranks, inside = group_of(job, group)
    if ranks == 1:
        return ()
    nic = size_bytes / inside * (1 - inside / ranks)
    return (GroupMessage(collective, group, ranks, size_bytes * (inside - 1) / inside, nic),)


def exchange(job: Job, size_bytes: float) -> tuple[GroupMessage, ...]:
    """Return the all-to-all of a rank's tokens, so many bytes, to the ranks of their experts.

    A token goes to a rank once, however many of its experts are there, and crosses to another domain once (as DeepEP
    and HybridEP send it). A router that picks groups of experts first limits how many domains it crosses to.
    """
    ranks, inside = group_of(job, "ep")
    if ranks == 1:
        return ()
    domains = ranks / inside
    chosen = job.model.num_experts_per_tok
    nvlink = size_bytes * _distinct(_reached(job, ranks), chosen) * (inside - 1) / inside
    nic = size_bytes * _distinct(_reached(job, domains), chosen) * (1 - 1 / domains)
    return (GroupMessage("all_to_all", "ep", ranks, nvlink, nic),)


def messages_of(job: Job, collective: BlockMessage) -> tuple[GroupMessage, ...]:
    """Return the message of a block's collective; nothing if its group has one rank."""
    if collective.kind == "all_to_all":
        return exchange(job, collective.size_bytes)
    ranks = job.cp if collective.kind == "ring" else 1  # each sends its own share around
    return gather(job, collective.group, ranks * collective.size_bytes, collective.kind)


def send(job: Job) -> tuple[GroupMessage, ...]:
    """Return the message of an activation, or its gradient, to the next stage."""
    if job.pp == 1:
        return ()
    return (between_stages(job, "send", BF16 * ModelCut.of(job).own_tokens * job.model.hidden_size),)


def between_stages(job: Job, collective: str, size_bytes: float) -> GroupMessage:
    """Return a message between two ranks of the pipeline; it takes NVLink where one domain has all GPUs."""
    inside = job.cluster.num_gpus <= job.cluster.nvlink_domain
    return GroupMessage(collective, "pp", 2, size_bytes if inside else 0.0, 0.0 if inside else size_bytes)


def _reached(job: Job, places: float) -> float:
    """Return how many of some equal places the experts of one token may be in: those of its groups."""
    if not job.model.n_group:
        return places
    return min(places, job.model.topk_group * max(1.0, places / job.model.n_group))


def _distinct(places: float, draws: int) -> float:
    """Return how many of some equal places are met by so many draws, on average."""
    return places * (1 - (1 - 1 / places) ** draws)
