"""Runs a pipeline of the fuzzer's under the stream checker, in real processes, with the gradients of one process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support import fuzz_models
from tests.support.fuzz import Life, Runner, off_by
from tests.support.fuzz_models import MOST_DIFFERENCE, Config, make_batch, make_model, own_part, run_whole
from tests.support.patience import PATIENT_S
from tests.support.planted import apply
from tests.support.ranks import check, run_ranks
from tests.support.sync_classes import op_kind
from treadle.runtime.checker import StreamFinding, check_streams, order_findings
from treadle.runtime.checker.log import Collective, Entry


@dataclass(frozen=True)
class CheckedRank:
    """What a rank's steps came to."""

    findings: list[StreamFinding]
    host_waits: Counter[tuple[str, str, str]]
    """(why, op's kind, line) of the second step."""
    collectives: list[Collective]
    wrong: list[str]
    """Gradients that differ from those of one process."""
    log: list[Entry]
    streams: list[str]


def config_of(schedule: str, kind: str, **changes: Any) -> Config:
    """A configuration with everything that has an order: MoE and its loss, a head, two layers a stage."""
    layered = kind != "cells"
    num_mb = 4 if schedule.startswith(("inter", "dualpipe")) else 3
    made = Config(
        schedule=schedule,
        kind=kind,
        dtype="float64",
        num_mb=num_mb,
        num_classes=16,
        num_layers=2,
        dropout=False,
        aux="own",
        layered=layered,
        ep=2 if kind in ("layers", "offload") else 1,
    )
    return replace(made, **changes)


class Recomputed(fuzz_models.Layer):
    """A layer that computes attention and experts again in backward."""

    def route(self, x: Tensor, *side: Any) -> Any:
        return checkpoint(super().route, x, *side, use_reentrant=False)

    def feed(self, *values: Any) -> Any:
        return checkpoint(super().feed, *values, use_reentrant=False)


def run_checked(rank: int, config: Config, recomputed: bool, with_log: bool) -> CheckedRank:
    """Two steps of a rank under the checker."""
    if recomputed:
        fuzz_models.Layer = Recomputed  # type: ignore[misc]
    replica = rank % (config.dp * config.ep)
    model = own_part(config, replica % config.ep)
    batches = [make_batch(config, number, replica) for number in range(2)]
    with check_streams() as checker:
        runner = Runner(Life(0, 0, config, 2, PATIENT_S, stop=False), rank, "thread", model)
        runner.step(0, batches[0])
        checker.forget()
        loss, grads = runner.step(1, batches[1])
        grads = {name: grad.clone() if grad is not None else None for name, grad in grads.items()}
        report = checker.report()
        collectives = list(checker.collectives)
        runner.pipe.close()
    whole_loss, whole, sizes = run_whole(config, make_model(config), 1, 1)
    wrong = [] if abs(loss - whole_loss) < 1e-9 else [f"the loss is {loss}, in one process {whole_loss}"]
    most = MOST_DIFFERENCE[config.dtype]
    wrong += [f"{name} is off" for name, grad in grads.items() if off_by(grad, whole[name], sizes[name]) > most]
    waits: Counter[tuple[str, str, str]] = Counter()
    for (why, where), times in report.host_waits.items():
        waits[why, op_kind(where.op), where.line] += times
    for finding in report.findings:
        finding.rank = rank
    log = checker.log if with_log else []
    return CheckedRank(report.findings, waits, collectives, wrong, log, checker.streams)


def run_planted(rank: int, plant: str, config: Config) -> CheckedRank:
    """The same with a mistake planted first."""
    apply(plant)
    return run_checked(rank, config, recomputed=False, with_log=False)


def check_pipeline(config: Config, *, recomputed: bool = False, with_log: bool = False) -> list[CheckedRank]:
    """All ranks of a pipeline."""
    return check(run_ranks(config.world, run_checked, config, recomputed, with_log))


def problems(ranks: list[CheckedRank]) -> list[str]:
    """What is wrong with a run, on any rank or between them."""
    told = [str(finding) for rank in ranks for finding in rank.findings]
    told += [wrong for rank in ranks for wrong in rank.wrong]
    return told + [str(finding) for finding in order_findings(dict(enumerate(rank.collectives for rank in ranks)))]
