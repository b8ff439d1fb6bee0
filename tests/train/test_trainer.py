"""The trainer on real ranks: layouts train alike and resume each other's checkpoints; what is not finite is named."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.support import deepep_contract
from tests.support.ranks import check, run_ranks
from tests.train.tiny import tiny
from train_runs import losses_of
from treadle.dist.groups import Group
from treadle.moe import EXCHANGES
from treadle.train.nonfinite import NonFiniteError
from treadle.train.trainer import Trainer

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2 x ep2": {"pp": 2, "ep": 2, "schedule": "interleaved-overlap", "recompute": ("attn",), "saved": "offload"},
    "ep2 x dp2": {"ep": 2},
    "pp4": {"pp": 4},
}


def _train(output: Path, layout: dict[str, Any], steps: int, **groups: dict[str, Any]) -> float:
    """Run up to a step; return the held-out loss then."""
    config = tiny(output, parallel=layout, training={"steps": steps, "eval_every": 2}, **groups)
    trainer = Trainer(config)
    before, seen = trainer.step, []
    trainer.run(after_step=lambda facts: seen.append((facts.step, trainer.step, facts.peak_bytes > 0)))
    assert seen == [(step, step, True) for step in range(before + 1, steps + 1)]
    loss = trainer.evaluate()
    trainer.close()
    return loss


def _layouts(rank: int, directory: Path) -> dict[str, float]:
    """Two steps on PP2 x EP2; the next two there, on EP2 x DP2 and on PP4, each from the same checkpoint."""
    held_out = {}
    first = directory / "first"
    _train(first, LAYOUTS["pp2 x ep2"], 2)
    for name, layout in LAYOUTS.items():
        if rank == 0:
            shutil.copytree(first / "checkpoints", directory / name / "checkpoints")
        dist.barrier()
        held_out[name] = _train(directory / name, layout, 4, data={"cache": str(first / "data")})
    return held_out


def test_a_run_resumes_on_other_layouts_with_the_same_losses(tmp_path: Path) -> None:
    held_out = check(run_ranks(4, _layouts, tmp_path))
    assert all(each == held_out[0] for each in held_out)
    losses = {name: losses_of(tmp_path / name) for name in LAYOUTS}
    same = losses["pp2 x ep2"]
    assert sorted(same) == [3, 4]
    assert losses_of(tmp_path / "first")[1] > same[4]
    for name in LAYOUTS:
        assert [losses[name][step] for step in same] == pytest.approx([same[step] for step in same], abs=1e-5), name
        assert held_out[0][name] == pytest.approx(held_out[0]["pp2 x ep2"], abs=1e-5), name


VARIANTS: dict[str, dict[str, Any]] = {
    "muon, sigmoid router, shared expert, MTP, tied": {
        "model": {
            "scoring": "sigmoid",
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "bias_update_rate": 0.01,
            "num_nextn_predict_layers": 1,
            "tie_word_embeddings": True,
        },
        "optimizer": {"name": "muon"},
    },
    "bfloat16": {"training": {"dtype": "bfloat16"}},
}


def _variants(rank: int, directory: Path) -> dict[str, list[list[float]]]:
    """Loss and gradient norm of two steps, on two layouts."""
    found: dict[str, list[list[float]]] = {}
    for name, groups in VARIANTS.items():
        for layout in ({"pp": 2, "ep": 2, "schedule": "dualpipev"}, {"ep": 4}):
            saved, data = {"every": 0, "resume": False}, {"cache": str(directory / "data")}
            trainer = Trainer(tiny(directory / name, parallel=layout, checkpoint=saved, data=data, **groups))
            facts = [trainer.train_step() for _ in range(2)]
            found.setdefault(name, []).append([each.loss for each in facts] + [each.grad_norm for each in facts])
            trainer.close()
    return found


def test_models_and_optimizers_train_alike_on_two_layouts(tmp_path: Path) -> None:
    found = check(run_ranks(4, _variants, tmp_path))[0]
    for (name, (one, other)), within in zip(found.items(), (1e-3, 5e-3), strict=True):  # torch's Muon uses bfloat16
        assert [one[0], one[2]] == pytest.approx([other[0], other[2]], rel=1e-5 if name != "bfloat16" else within), name
        assert one == pytest.approx(other, rel=within), name
        assert one[1] < one[0] - 0.05, name


def _planned_again(rank: int, directory: Path) -> list[tuple[list[float], bool]]:
    """The losses of five steps, one of them evaluated after, and whether the order of ops is another then."""
    found = []
    for again in (0, 2):
        layout = {"pp": 2, "ep": 2, "schedule": "interleaved-overlap", "plan_again_at": again}
        training, groups = {"steps": 5, "eval_every": 0}, {"data": {"cache": str(directory / "data")}}
        trainer = Trainer(tiny(directory / str(again), parallel=layout, training=training, **groups))
        losses, program = [trainer.train_step().loss], trainer.pipe.program
        losses += [trainer.train_step().loss for _ in range(3)] + [trainer.evaluate()]
        trainer.pipe.gather_trace()
        found.append((losses, trainer.pipe.program is program))
        trainer.close()
    return found


def test_a_run_that_plans_again_by_measured_costs_has_the_same_bits(tmp_path: Path) -> None:
    ends = check(run_ranks(4, _planned_again, tmp_path))
    for (losses, is_first), (again, is_still_first) in ends:
        assert (is_first, is_still_first) == (True, False)
        assert losses == again == ends[0][0][0]


def _control_collectives(rank: int, directory: Path) -> list[int]:
    """How many collectives of control each step has that `run` makes, where it evaluates after the third of five."""
    training = {"steps": 5, "eval_every": 3}
    trainer, num = Trainer(tiny(directory / "run", parallel={"pp": 2}, training=training)), list[int]()
    groups = (trainer.pipe.groups.pp_group, trainer.pipe.groups.dp_group)
    launch, step = Group.launch_reduce, trainer.pipe.step

    def counted(group: Group, tensor: Any, **options: Any) -> Any:
        num[-1] += group in groups and tensor.nbytes < 4096
        return launch(group, tensor, **options)

    def stepped(*args: Any, **options: Any) -> Any:
        num.append(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Group, "launch_reduce", counted)
            return step(*args, **options)

    trainer.pipe.step = stepped  # type: ignore[method-assign]
    trainer.run()
    trainer.close()
    return num


def test_a_step_that_a_step_follows_has_two_collectives_of_control(tmp_path: Path) -> None:
    """The first compares the calls, and so does the one after an evaluation."""
    assert check(run_ranks(4, _control_collectives, tmp_path)) == [[4, 2, 2, 4, 2]] * 4


def _groups_made(rank: int, directory: Path) -> list[int]:
    """The sizes of gloo's process groups that a trainer makes."""
    sizes: list[int] = []

    class Counted(dist.ProcessGroupGloo):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            sizes.append(self.size())

    with pytest.MonkeyPatch.context() as patch:
        for module in (dist, distributed_c10d):
            patch.setattr(module, "ProcessGroupGloo", Counted)
        trainer = Trainer(tiny(directory / "run", parallel={"pp": 2}))
    trainer.close()
    return sizes


def test_a_trainer_makes_no_process_group_that_it_does_not_use(tmp_path: Path) -> None:
    channels, control, replicas, checkpoints = 2, 1, 1, [4]
    assert check(run_ranks(4, _groups_made, tmp_path)) == [[2] * (channels + control + replicas) + checkpoints] * 4


def _exchanges(rank: int, directory: Path) -> dict[str, list[float]]:
    """The losses of two steps and of held-out text by each exchange; DeepEP by what it documents, once it is there."""
    found: dict[str, list[float]] = {}
    groups: dict[str, dict[str, Any]] = {
        "checkpoint": {"every": 0, "resume": False},
        "data": {"cache": str(directory / "data")},
    }
    for exchange in EXCHANGES:
        layout = {"pp": 2, "ep": 2, "schedule": "interleaved-overlap", "exchange": exchange}
        config = tiny(directory / exchange, parallel=layout, training={"dtype": "bfloat16"}, **groups)
        if exchange == "deepep":
            sys.modules["deep_ep"] = None  # type: ignore[assignment]
            with pytest.raises(ValueError, match=r"needs the package deep_ep .*; install it, or"):
                Trainer(config)
            deepep_contract.install()
        trainer = Trainer(config)
        found[exchange] = [trainer.train_step().loss for _ in range(2)] + [trainer.evaluate()]
        trainer.close()
    return found


def test_each_exchange_trains_alike_and_one_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    found = check(run_ranks(4, _exchanges, tmp_path))[0]
    assert found["deepep"] == pytest.approx(found["all_to_all"], rel=5e-3)
    assert found["deepep"][1] < found["deepep"][0] - 0.05
    assert found["deepep"] != found["all_to_all"], "another exchange adds up in another order"


def _not_finite(rank: int, directory: Path) -> list[str]:
    """What each spoilt step of one run says: a step that fails changes nothing, so the next begins as it did."""
    told = []
    layout = {"pp": 2, "ep": 2, "schedule": "interleaved-overlap"}
    trainer = Trainer(tiny(directory, parallel=layout, training={"steps": 4}))
    trainer.train_step()
    for case in ("gradient", "output", "parameter"):
        hook = _spoil(trainer, case, rank)
        try:
            trainer.run()
            told.append("nothing")
        except NonFiniteError as error:
            told.append(str(error))
        if hook is not None:
            hook.remove()
        trainer.optimizer.zero_grad()
    trainer.close()
    return told


def _spoil(trainer: Trainer, case: str, rank: int) -> Any:
    """Spoil the second step of rank 1, which has expert 2 and 3 of layers 0 and 2; return the hook that does."""
    if rank != 1:
        return None
    view = next(view for view in trainer.views if view.name == "model.layers.2.mlp.experts.3.up_proj.weight")
    if case == "gradient":
        return view.tensor.register_hook(  # type: ignore[no-untyped-call]
            lambda grad: grad.index_fill(0, torch.tensor(1), math.inf)
        )
    if case == "output":
        norm = next(m for name, m in trainer.stages[1].named_modules() if name.endswith("post_attention_layernorm"))
        return norm.register_forward_hook(lambda _m, _i, made: made * math.inf)
    view.of(view.tensor.detach())[0, 0] = math.nan
    return None


def test_what_is_not_finite_stops_with_rank_layer_and_parameter(tmp_path: Path) -> None:
    first, *others = check(run_ranks(4, _not_finite, tmp_path))
    assert all(each == first for each in others)
    gradient, output, parameter = first
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    assert parameter == f"step 2: the loss is nan; first: rank 1, layer 2: parameter {name} is not finite"
    assert output.startswith("step 2: the loss is nan; first: rank 1, stage 2, layer 2: attn made leaving not finite")
    assert "step 2: a gradient has NaN or infinity, the loss is 5." in gradient
    assert "rank 1, layer 2: the gradient of model.layers.2.mlp.experts.3." in gradient
