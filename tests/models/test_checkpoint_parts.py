"""Checkpoints in parts: a rank reads its own, ranks write one together, and a cut-off one is none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.models.tiny import QWEN3_MOE, apart, loaded, tokens
from tests.support.ranks import check, run_ranks
from treadle.models import (
    ModelConfig,
    build_stages,
    load_pretrained,
    run_stage,
    save_pretrained,
    tied_parameters,
    views,
    views_of_stages,
)

MANY = replace(QWEN3_MOE, num_experts=8, num_nextn_predict_layers=1, tie_word_embeddings=True)


def test_a_rank_opens_only_the_files_that_have_its_tensors(tmp_path: Path) -> None:
    whole = _saved(tmp_path, max_shard_bytes=2_000)  # about a file a tensor
    stages = build_stages(QWEN3_MOE, ("Ett", "t", "tL"), {0: 1}, ep=2, ep_rank=1)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    wanted = {view.name for view in views_of_stages(stages)}
    assert wanted == {name for name in index if name.startswith("model.layers.2.") and not _of_other_rank(name)}
    needed = {index[name] for name in wanted}
    others = set(index.values()) - needed
    assert len(others) > len(needed) > 1
    for file in others:
        (tmp_path / file).unlink()
    load_pretrained(stages, tmp_path)
    assert all(torch.equal(value, whole[name]) for name, value in _values(stages).items())
    (tmp_path / sorted(needed)[0]).unlink()
    with pytest.raises(FileNotFoundError):
        load_pretrained(stages, tmp_path)


def _saved(directory: Path, **options: int) -> dict[str, torch.Tensor]:
    stages = build_stages(QWEN3_MOE, (QWEN3_MOE.blocks,), {0: 0}, seed=2)
    save_pretrained(stages, QWEN3_MOE, directory, **options)  # type: ignore[arg-type]
    return _values(stages)


def _of_other_rank(name: str) -> bool:
    return any(f".experts.{expert}." in name for expert in (0, 1))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hidden_size": 16}, r"model.embed_tokens.weight is \[61, 16\] in this model, got \[61, 32\]"),
        (
            {"num_hidden_layers": 5},
            r"lacks \d+ tensors of this model, the first model.layers.4.*; build the model from",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(change: dict[str, int], match: str, tmp_path: Path) -> None:
    _saved(tmp_path)
    other = replace(QWEN3_MOE, **change)  # type: ignore[arg-type]
    stages = build_stages(other, (other.blocks,), {0: 0})
    before = [p.clone() for p in stages[0].parameters()]
    with pytest.raises(ValueError, match=match):
        load_pretrained(stages, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, stages[0].parameters(), strict=True))


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        load_pretrained(build_stages(QWEN3_MOE, (QWEN3_MOE.blocks,), {0: 0}), tmp_path)


def test_a_part_of_a_model_is_not_saved_as_a_whole(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the ranks together lack .* the first model.layers.2"):
        save_pretrained(build_stages(QWEN3_MOE, ("Ett", "ttL"), {0: 0}), QWEN3_MOE, tmp_path)


def test_initial_values_do_not_depend_on_the_cut() -> None:
    whole = _values(build_stages(MANY, (MANY.blocks,), {0: 0}, seed=5))
    parts: dict[str, torch.Tensor] = {}
    for ep_rank in range(2):
        for stage in range(3):
            parts |= _values(build_stages(MANY, ("Et", "tt", "tmL"), {0: stage}, ep=2, ep_rank=ep_rank, seed=5))
    assert parts.keys() == whole.keys()
    assert all(torch.equal(part, whole[name]) for name, part in parts.items())
    assert len({round(float(value.double().sum()), 9) for value in whole.values() if value.dim() > 1}) == sum(
        value.dim() > 1 for value in whole.values()
    ), "tensors differ from each other"
    other = _values(build_stages(MANY, (MANY.blocks,), {0: 0}, seed=6))
    assert not torch.equal(other["model.embed_tokens.weight"], whole["model.embed_tokens.weight"])


def _values(stages: dict[int, torch.nn.Sequential]) -> dict[str, torch.Tensor]:
    return {view.name: view.of(view.tensor).detach() for view in views_of_stages(stages)}


def test_copies_of_a_shared_parameter_are_one_object_and_have_one_name() -> None:
    stages = build_stages(MANY, ("Et", "tt", "tmL"), {0: 0, 1: 2})
    (embedding,) = [view.tensor for view in views(stages[0]) if view.name == "model.embed_tokens.weight"]
    (copy,) = [view.tensor for view in views(stages[1]) if view.name == "model.embed_tokens.weight"]
    assert copy is embedding
    assert "lm_head.weight" not in {view.name for view in views_of_stages(stages)}
    assert len(views_of_stages(stages)) == len({view.name for view in views_of_stages(stages)})
    ties = tied_parameters(MANY, ("Et", "tt", "tmL"))
    assert ties == {"embedding": {0: "0.embed_tokens.weight", 2: "1.embed_tokens.weight"}}
    assert stages[1].get_parameter(ties["embedding"][2]) is embedding
    untied = replace(MANY, tie_word_embeddings=False)
    assert tied_parameters(untied, ("Et", "ttt", "m", "L")) == {
        "embedding": {0: "0.embed_tokens.weight", 2: "0.embed_tokens.weight"},
        "head": {2: "0.shared_head.head.weight", 3: "0.lm_head.weight"},
    }
    assert tied_parameters(untied, (untied.blocks,)) is None


LAYOUTS = [
    (QWEN3_MOE, ("Et", "t", "t", "tL"), 1),
    (replace(QWEN3_MOE, num_experts=8), ("Ett", "ttL"), 2),
    (QWEN3_MOE, (QWEN3_MOE.blocks,), 4),
    (MANY, ("E", "tttt", "m", "L"), 1),
]


def _save(rank: int, directory: Path) -> None:
    for at, (config, rows, ep) in enumerate(LAYOUTS):
        stage, replica = divmod(rank, 4 // len(rows))
        stages = build_stages(config, rows, {0: stage}, ep=ep, ep_rank=replica % ep, seed=at)
        save_pretrained(stages, config, directory / str(at), max_shard_bytes=10_000)
    group = dist.new_group([2, 3])
    if rank >= 2:
        stages = build_stages(QWEN3_MOE, ("Ett", "ttL"), {0: rank - 2}, seed=9)
        save_pretrained(stages, QWEN3_MOE, directory / "group", group=group)


@pytest.mark.slow
def test_ranks_write_one_checkpoint_that_transformers_loads(tmp_path: Path) -> None:
    import transformers

    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "model.safetensors").write_bytes(b"of an earlier run")
    check(run_ranks(4, _save, tmp_path))
    cases: list[tuple[str, int, ModelConfig]] = [(str(at), at, config) for at, (config, _, _) in enumerate(LAYOUTS)]
    for name, seed, config in [*cases, ("group", 9, QWEN3_MOE)]:
        whole = build_stages(config, (config.blocks,), {0: 0}, seed=seed)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        batch = tokens(2)
        with torch.no_grad():
            assert apart(run_stage(whole[0], batch), model(batch).logits) <= 1e-6, name
        again, ours = loaded(tmp_path / name)
        assert again == config
        assert all(
            torch.equal(a.of(a.tensor), b.of(b.tensor)) for a, b in zip(views(whole[0]), views(ours), strict=True)
        ), "MTP blocks too, which transformers does not have"
