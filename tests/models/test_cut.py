"""Causal models of transformers cut into stages: the gradients of the whole model, in one process and in pipelines."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from tests.models.tiny import VOCAB, tokens
from tests.support.devices import DEVICE_TYPE, drawn
from tests.support.ranks import check, run_ranks
from treadle.models import Documents, cut_causal_lm, cut_ties, loss_fn, views

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "GPT2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": True} | SIZES,
    "Gemma2": {**GROUPED, "sliding_window": 5, "tie_word_embeddings": True},
    "Qwen2": {
        **GROUPED,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "sliding_window": 5,
        "use_sliding_window": True,
    },
    "OPT": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0},
    "Bloom": {**SIZES, "n_layer": 4, "n_head": 4},
    "GPTNeoX": SIZES,
}
APART = ("Llama", "GPT2", "Gemma2", "Qwen2", "GPTNeoX")
"""Those whose masks follow positions."""


def _make(name: str) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * drawn(torch.randn, parameter.shape, generator=generator))
    return model


def _backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _furthest(got: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    return max((float((g - expected[n]).abs().max() / expected[n].abs().max()), n) for n, g in got.items())


@pytest.mark.slow  # transformers takes seconds to import
@pytest.mark.parametrize("layers", [[1, 2, 1], ["E", "tt", "tt", "L"]], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_stages_have_the_gradients_of_the_whole_model(name: str, layers: list[Any]) -> None:
    model, sequences = _make(name), tokens(3)
    inputs, targets = sequences[:, :-1], sequences[:, 1:]
    _backward(loss_fn(model(inputs, use_cache=False).logits, targets))
    expected, state = _gradients(model), set(model.state_dict())
    model.zero_grad()
    stages = cut_causal_lm(model, layers, dict(enumerate(range(len(layers)))))
    x = inputs
    for stage in stages.values():
        x = stage(x)
    _backward(loss_fn(x, targets))
    assert expected.keys() == _gradients(model).keys()
    assert _furthest(_gradients(model), expected)[0] <= 1e-6
    assert set(model.state_dict()) == state, "the model is what it was"
    named = [view for stage in stages.values() for view in views(stage)]
    assert {view.name: view.tensor for view in named if isinstance(view.tensor, nn.Parameter)} == dict(
        model.named_parameters()
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_documents_are_kept_apart_or_refused(name: str) -> None:
    model, inputs = _make(name).eval(), tokens(1)[:, :-1]
    stages = cut_causal_lm(model, [2, 2], {0: 0, 1: 1})
    documents = Documents(((5, 7),))
    with torch.no_grad():
        if name in APART:
            packed = stages[1](stages[0](inputs, documents=documents), documents=documents)
            for where in (slice(0, 5), slice(5, 12)):
                torch.testing.assert_close(packed[:, where], model(inputs[:, where]).logits)
        else:
            with pytest.raises(ValueError, match="does not keep the documents of a sequence apart"):
                stages[0](inputs, documents=documents)
        one = Documents(((12,),))
        whole = stages[1](stages[0](inputs, documents=one), documents=one)
        torch.testing.assert_close(whole, model(inputs).logits)


HYBRID: dict[str, dict[str, Any]] = {
    "Lfm2": {**GROUPED, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3},
    "Jamba": {**GROUPED, "num_experts": 2, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1},
    "Mixtral": {**GROUPED, "num_local_experts": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRID)
def test_documents_of_small_weights_are_kept_apart_or_refused(name: str) -> None:
    """As transformers initialises them, a leak is smaller than what rounding may be: gradients tell exactly."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**HYBRID[name])
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    inputs, documents = tokens(1)[:, :-1], Documents(((5, 7),))
    stages = cut_causal_lm(model, [2, 2], {0: 0, 1: 1})
    with torch.no_grad():
        if name == "Mixtral":  # experts mix no tokens, though their matrices' sizes follow from all of them
            packed = stages[1](stages[0](inputs, documents=documents), documents=documents)
            torch.testing.assert_close(packed[:, 5:], model(inputs[:, 5:]).logits)
        else:
            with pytest.raises(ValueError, match="does not keep the documents of a sequence apart"):
                stages[0](inputs, documents=documents)
    assert all(param.grad is None for param in model.parameters()), "the probe leaves no gradient"


@pytest.mark.slow
def test_stages_that_are_not_the_model_are_refused() -> None:
    model = _make("Llama")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has 4 layers, got stages with \[2, 3\]"):
        cut_causal_lm(model, [2, 3], {0: 0})
    with pytest.raises(ValueError, match="chunk 0 is to be stage 2; stages are 0 to 1"):
        cut_causal_lm(model, [2, 2], {0: 2})


class _Output(NamedTuple):
    logits: Tensor


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + torch.tanh(self.linear(hidden_states))


class Toy(nn.Module):
    """A causal model as far as cutting goes, with something about it that cannot be cut."""

    def __init__(self, trouble: str = "") -> None:
        super().__init__()
        self.trouble = trouble
        self.embed, self.norm, self.head = nn.Embedding(VOCAB, 8), nn.LayerNorm(8), nn.Linear(8, VOCAB)
        self.layers = nn.ModuleList(_Layer() for _ in range(4))
        if trouble == "a parameter of its own":
            self.scale = nn.Parameter(torch.ones(()))
        if trouble == "a shared layer":
            self.layers[3] = self.layers[0]

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **_: Any) -> _Output:
        x = embedded = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            x = layer(x)
            if self.trouble == "a norm between layers":
                x = self.norm(x)
        return _Output(self.head(self.norm(x) + (embedded if self.trouble == "a skip over all layers" else 0)))


def test_a_plain_model_in_the_shape_of_transformers_can_be_cut() -> None:
    stages = cut_causal_lm(Toy(), [1, 0, 3], {0: 0, 1: 1, 2: 2})
    assert [sum(p.numel() for p in stage.parameters()) for stage in stages.values()] == [
        VOCAB * 8 + 72,
        0,
        3 * 72 + 16 + 9 * VOCAB,
    ]


@pytest.mark.parametrize(
    ("trouble", "match"),
    [
        ("a skip over all layers", "Toy cannot be cut: its stages do not give its logits"),
        ("a norm between layers", "Toy calls norm, which has parameters, between its layers"),
        ("a parameter of its own", "Toy has the parameter scale in itself, around its layers"),
        ("a shared layer", r"Toy has one parameter as layers\.0\.linear\.weight and layers\.3\.linear\.weight"),
    ],
)
def test_what_cannot_be_cut_is_refused(trouble: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        cut_causal_lm(Toy(trouble), [2, 2], {0: 0})


CASES = [
    ("Llama", "zb-v", 2, 1),
    ("GPT2", "1f1b", 2, 1),
    ("Gemma2", "dualpipe", 2, 1),
    ("GPT2", "interleaved", 1, 2),
]
"""On two ranks: each has transformers to import, which takes longer than all that it does then."""


def _run(rank: int) -> list[tuple[str, float, str]]:
    found = []
    for name, schedule_name, pp, dp in CASES:
        whole, batch = _make(name), tokens(8)
        model = copy.deepcopy(whole)
        inputs, targets = batch[:, :-1], batch[:, 1:]
        _backward(loss_fn(whole(inputs, use_cache=False).logits, targets) / targets.numel())
        mesh = init_device_mesh(DEVICE_TYPE, (pp, dp), mesh_dim_names=("pp", "dp"))
        schedule = treadle.generate(schedule_name, pp=pp, microbatches=4)
        num = schedule.placement.num_stages
        layers = [(at + 1) * 4 // num - at * 4 // num for at in range(num)]
        held = dict(enumerate(schedule.placement.stages[mesh.get_local_rank("pp")]))
        stages = cut_causal_lm(model, layers, held)
        pipe = treadle.Pipeline(stages, schedule, mesh=mesh, loss_fn=loss_fn, tied=cut_ties(model, num))
        mine = [t.chunk(dp)[mesh.get_local_rank("dp")] for t in (inputs, targets)]
        positions = torch.arange(inputs.shape[1]).expand_as(mine[0])
        pipe.step(*mine, side={"positions": positions}, num_tokens=targets.numel())
        got = {v.name: v.tensor.grad for stage in stages.values() for v in views(stage) if v.tensor.grad is not None}
        pipe.close()
        found.append((f"{name} {schedule_name}", *_furthest(got, _gradients(whole))))
    return found


@pytest.mark.slow
def test_pipelines_of_cut_models_have_the_gradients_of_the_whole() -> None:
    for of_rank in check(run_ranks(2, _run)):
        assert len(of_rank) == len(CASES)
        assert max(difference for _, difference, _ in of_rank) <= 1e-5, of_rank
