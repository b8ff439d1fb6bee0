"""torch's runtime on files with messages: the gradients of one process, stages under FSDP2 too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import treadle
from tests.support.oracle import cut, grads_of, make_batch, make_mesh, make_stages, mean_loss, run_whole, worst
from tests.support.paths import ROOT
from tests.support.ranks import check, run_ranks
from treadle.files.torch_comms import Receives
from treadle.integrations import torch_pipelining
from treadle.ir import Pair
from treadle.schedules import SCHEDULES

pytestmark = pytest.mark.slow

MOST_DIFFERENCE = 1e-12
CARRIED = sorted(set(SCHEDULES) - {"dualpipe"})


class Case(NamedTuple):
    """A file, and how it is run."""

    name: str
    pp: int
    dp: int
    receives: Receives
    overlapped: bool = False

    @property
    def schedule(self) -> treadle.Schedule:
        return treadle.generate(self.name, pp=self.pp, microbatches=2 * self.pp)

    def write(self, path: Path) -> None:
        fsdp = self.dp > 1
        path.write_text(treadle.dumps(self.schedule, "torch-comms", receives=self.receives, fsdp=fsdp))


class Ran(NamedTuple):
    """The worst gradient of a rank, its name, and how many overlapped cells our function ran."""

    difference: float
    where: str
    pairs: int


def run_cases(rank: int, cases: list[Case], directory: Path) -> list[Ran]:
    return [run_case(rank, case, directory / f"{place}.csv") for place, case in enumerate(cases)]


def run_case(rank: int, case: Case, path: Path) -> Ran:
    """A step by torch's runtime; each replica has a batch of its own."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import OVERLAP_F_B, _PipelineScheduleRuntime

    schedule = case.schedule
    num_stages, num_mb = schedule.placement.num_stages, schedule.num_microbatches
    whole = make_stages(num_stages)
    batches = [make_batch(num_mb, replica) for replica in range(case.dp)]
    run_whole(whole, cut(batches, num_mb), mean_loss)

    mesh = make_mesh(case.pp, case.dp)
    pp_rank, replica = rank // case.dp, rank % case.dp
    stages = make_stages(num_stages)
    own = {number: stages[number] for number in schedule.placement.stages[pp_rank]}
    if case.dp > 1:
        for stage in own.values():
            fully_shard(stage, mesh=mesh["dp"])
    device, group = torch.get_default_device(), mesh.get_group("pp")
    parts: list[Any] = [PipelineStage(stage, number, num_stages, device, group=group) for number, stage in own.items()]
    runtime: Any = _PipelineScheduleRuntime(parts, num_mb, loss_fn=mean_loss)  # type: ignore[no-untyped-call]
    ran: list[str] = []
    if case.overlapped:
        torch_pipelining.load_schedule(runtime, path)
        ours = runtime._comp_type_to_function_map[OVERLAP_F_B]

        def counted(action: Any, ctx: Any) -> None:
            ran.append(str(action))
            ours(action, ctx)

        runtime.register_custom_function(OVERLAP_F_B, counted)
    else:
        runtime._load_csv(str(path), format="compute_comms")
    inputs, targets = batches[replica]
    losses: list[Tensor] = []
    more = {"target": targets, "losses": losses} if num_stages - 1 in own else {}
    runtime.step(*((inputs,) if 0 in own else ()), **more)
    got = {name: full(grad) for name, grad in grads_of(own).items()}
    return Ran(*worst(got, grads_of(dict(enumerate(whole)))), len(ran))


def full(grad: Any) -> Tensor | None:
    whole: Tensor | None = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return whole


def hold(world: int, cases: list[Case], directory: Path) -> None:
    for place, case in enumerate(cases):
        case.write(directory / f"{place}.csv")
    ranks = check(run_ranks(world, run_cases, cases, directory))
    for place, case in enumerate(cases):
        found = max(results[place] for results in ranks)
        print(f"{case} {found.difference:.1e}")  # noqa: T201 - `pytest -s` shows the table
        assert found.difference <= MOST_DIFFERENCE, f"{case}: {found.where} differs by {found.difference}"
        if case.overlapped:
            pairs = [sum(isinstance(cell, Pair) for cell in row) for row in case.schedule.rows]
            assert [results[place].pairs for results in ranks[:: case.dp]] == pairs
            assert max(pairs) >= 2


def grid(world: int) -> list[Case]:
    """All schedules, plain and under FSDP2, receives early and late; overlapped cells by our function too."""
    placements: tuple[Receives, ...] = ("early", "late")
    found = [Case(name, world // dp, dp, receives) for name in CARRIED for dp in (1, 2) for receives in placements]
    paired = ("dualpipev", "interleaved-overlap")
    return found + [Case(name, world // dp, dp, "late", True) for name in paired for dp in (1, 2)]


def test_torch_makes_the_gradients_of_one_process_of_our_messages(tmp_path: Path) -> None:
    """Late receives, and FSDP2 with early ones; overlapped cells by our function."""
    by_day = {(1, "late"), (2, "early")}
    hold(4, [case for case in grid(4) if case.overlapped or (case.dp, case.receives) in by_day], tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CARRIED)
@pytest.mark.parametrize("world", [4, 8])
def test_torch_makes_the_gradients_of_one_process_of_every_file(world: int, name: str, tmp_path: Path) -> None:
    hold(world, [case for case in grid(world) if case.name == name], tmp_path)


def test_a_file_that_is_not_clean_or_of_another_size_is_not_loaded(tmp_path: Path) -> None:
    runtime: Any = SimpleNamespace(_n_microbatches=8)  # that has nothing else: it is not touched
    with pytest.raises(ValueError, match=r"(?s)zbv_defer_pp_recv.csv is not clean, so it is not run:\nT204 rank 1"):
        torch_pipelining.load_schedule(runtime, ROOT / "examples" / "torch" / "zbv_defer_pp_recv.csv")
    path = tmp_path / "small.csv"
    path.write_text(treadle.dumps(treadle.generate("1f1b", pp=2, microbatches=4), "torch-comms"))
    with pytest.raises(ValueError, match="4 micro-batches and the runtime 8; write the file with -m 8, or make the"):
        torch_pipelining.load_schedule(runtime, path)
    treadle.save_trace(treadle.simulate(treadle.generate("1f1b", pp=2, microbatches=4), "unit"), tmp_path / "t.json")
    with pytest.raises(ValueError, match="holds no schedule; torch's runtime loads what"):
        torch_pipelining.load_schedule(runtime, tmp_path / "t.json")
