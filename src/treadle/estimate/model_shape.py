"""The shape of a model: the sizes that its parameters, computation and messages follow from.

Fields have Hugging Face's names. A shape comes from a preset, a TOML file with these fields, or a config.json as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from treadle.estimate.hf_config import EXPERT_FIELDS, fields_of_config
from treadle.fields.input_files import Toml, read_json, read_toml
from treadle.fields.kinds import COUNT, FROM_1, Flag, Text, ValueKind
from treadle.fields.nearest import did_you_mean, hint

PRESETS = Path(__file__).parent / "presets" / "models"
_MLA_FIELDS = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_FROM_ONE = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer, dense or a mixture of experts.

    Raises:
        ValueError: sizes that make no model; the message names the field.

    Example:
        >>> shape = ModelShape("tiny", hidden_size=64, num_hidden_layers=4, vocab_size=256, num_attention_heads=4)
        >>> shape.blocks
        'EttttL'

    """

    name: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int = 0
    """Heads of keys and values (GQA). 0: as many as of queries."""

    head_dim: int = 0
    """0: hidden_size / num_attention_heads."""

    intermediate_size: int = 0
    """Width of a dense layer's MLP. 0: 4 x hidden_size."""

    gated_mlp: bool = True
    """MLPs and experts have three matrices (SwiGLU), not two (GELU)."""

    kv_lora_rank: int = 0
    """Multi-head latent attention (MLA): the rank that keys and values are compressed to. 0: attention is GQA."""

    q_lora_rank: int = 0
    """The rank that queries of MLA are compressed to. 0: they are not."""

    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    num_experts: int = 0
    """Routed experts of an MoE layer. 0: the model is dense."""

    num_experts_per_tok: int = 0
    n_group: int = 0
    """Groups of experts, of which a token's are in `topk_group` at most: hosts that it is sent to. 0: no such limit."""

    topk_group: int = 0
    moe_intermediate_size: int = 0
    n_shared_experts: int = 0
    """Shared experts, each as wide as a routed one."""

    shared_expert_intermediate_size: int = 0
    """Width of all shared experts together, where it is no multiple of a routed one's (Qwen2-MoE). 0: as
    n_shared_experts says."""

    first_k_dense_replace: int = 0
    """Layers, from the first on, that are dense."""

    num_nextn_predict_layers: int = 0
    """MTP blocks after the layers; each has an MoE layer (or a dense one in a dense model) and the head's loss."""

    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Projections of attention have biases."""

    qkv_bias: bool = False
    """Projections to queries, keys and values have biases, and that of attention's output has none (Qwen2)."""

    mlp_bias: bool = False
    """Matrices of MLPs and experts have biases."""

    qk_norm: bool = False
    """Queries and keys are normalised, each head alike (Qwen3)."""

    sliding_window: int = 0
    """Tokens that a layer with windowed attention looks back at. 0: every layer looks at all."""

    num_windowed_layers: int = 0
    """How many layers have windowed attention."""

    max_position_embeddings: int = 0
    """Positions of a learned position embedding (GPT-3). 0: positions are rotary."""

    source: str = ""
    """Where these sizes are published."""

    def __post_init__(self) -> None:
        self._check_numbers()
        defaults = {
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": self.hidden_size // self.num_attention_heads,
            "intermediate_size": 4 * self.hidden_size,
        }
        for name, value in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        self._check_attention()
        if not 0 <= self.first_k_dense_replace <= self.num_hidden_layers:
            raise ValueError(
                f"first_k_dense_replace is 0 to num_hidden_layers ({self.num_hidden_layers}), "
                f"got {self.first_k_dense_replace}"
            )
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok is 1 to num_experts ({self.num_experts}), got {self.num_experts_per_tok}"
            )
        if self.n_group and not 1 <= self.topk_group <= self.n_group:
            raise ValueError(f"topk_group is 1 to n_group ({self.n_group}), got {self.topk_group}")
        if self.num_experts and not self.moe_intermediate_size:
            raise ValueError("a model with experts needs their width; give moe_intermediate_size")
        idle = next((name for name in EXPERT_FIELDS if getattr(self, name)), None)
        if idle is not None and not self.num_experts:
            raise ValueError(f"{idle} is about experts, and the model has none; give num_experts, or leave it out")
        if self.shared_expert_intermediate_size and self.n_shared_experts:
            raise ValueError("shared experts need shared_expert_intermediate_size or n_shared_experts; give one")

    def _check_numbers(self) -> None:
        for field in fields(self):
            number = FROM_1 if field.name in _FROM_ONE else COUNT
            kinds: dict[str, ValueKind] = {"int": number, "bool": Flag(), "str": Text()}
            kinds[str(field.type)].check(getattr(self, field.name), field.name)

    def _check_attention(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads divides num_attention_heads ({self.num_attention_heads}), "
                f"got {self.num_key_value_heads}"
            )
        if self.is_mla and not (self.qk_nope_head_dim and self.v_head_dim):
            raise ValueError("attention with kv_lora_rank is MLA; give qk_nope_head_dim, qk_rope_head_dim, v_head_dim")
        idle = next((name for name in _MLA_FIELDS if getattr(self, name)), None)
        if idle is not None and not self.is_mla:
            raise ValueError(f"{idle} is about MLA, and attention is GQA; give kv_lora_rank, or leave it out")
        if bool(self.sliding_window) != bool(self.num_windowed_layers):
            raise ValueError(
                "a window has a width and layers that have it; give sliding_window and num_windowed_layers, or "
                f"neither, got {self.sliding_window} and {self.num_windowed_layers}"
            )
        if self.num_windowed_layers > self.num_hidden_layers:
            raise ValueError(
                f"num_windowed_layers is 0 to num_hidden_layers ({self.num_hidden_layers}), "
                f"got {self.num_windowed_layers}"
            )

    @property
    def is_moe(self) -> bool:
        """True if layers after the dense ones have experts."""
        return self.num_experts > 0

    @property
    def is_mla(self) -> bool:
        """True if attention is multi-head latent attention."""
        return self.kv_lora_rank > 0

    @property
    def shared_width(self) -> int:
        """Width of all shared experts together; 0 if there is none."""
        return self.shared_expert_intermediate_size or self.n_shared_experts * self.moe_intermediate_size

    @property
    def num_dense_layers(self) -> int:
        """Layers without experts."""
        return self.first_k_dense_replace if self.is_moe else self.num_hidden_layers

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts, without those of MTP blocks."""
        return self.num_hidden_layers - self.num_dense_layers

    @property
    def blocks(self) -> str:
        """The letters of the whole model in order, as `treadle.ir.blocks` has them. Layers of a dense model are t."""
        dense = self.first_k_dense_replace if self.is_moe else 0
        return "E" + "d" * dense + "t" * (self.num_hidden_layers - dense) + "m" * self.num_nextn_predict_layers + "L"


_FIELDS = {field.name for field in fields(ModelShape)}


def load_model(name: str | Path) -> ModelShape:
    """Read a model's shape: a preset's name, a TOML file, a config.json, or a directory with one.

    Raises:
        ValueError: there is no such preset or file, or it is no model.

    """
    path, preset = Path(name), PRESETS / f"{str(name).lower()}.toml"
    if path.is_dir() and ((path / "config.json").is_file() or not preset.is_file()):
        return _from_directory(path)
    if path.suffix == ".json":
        return shape_from_hf(read_json(path), path.parent.name or path.stem)
    if path.suffix == ".toml":
        return _from_fields(read_toml(path), path.stem)
    if preset.is_file():
        return _from_fields(read_toml(preset), preset.stem)
    known = sorted(file.stem for file in PRESETS.glob("*.toml"))
    raise ValueError(
        f"a model is a preset ({', '.join(known)}), a .toml file, a config.json or a directory with one, "
        f"got {str(name)!r}{hint(path.name, known)}"
    )


def _from_directory(directory: Path) -> ModelShape:
    file = directory / "config.json"
    if not file.is_file():
        raise ValueError(f"no config.json in {directory}; a directory of a model has Hugging Face's")
    return shape_from_hf(read_json(file), directory.resolve().name)


def shape_from_hf(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of a Hugging Face config.json; fields that do not matter to it are passed over.

    Raises:
        ValueError: sizes are lacking or make no model; the message names the field.

    """
    return ModelShape(name, **fields_of_config(config, name))


def _from_fields(file: Toml, name: str) -> ModelShape:
    unknown = sorted(set(file.table) - _FIELDS)
    if unknown:
        way_out = did_you_mean(unknown[0], sorted(_FIELDS))
        raise ValueError(f"{file.at(unknown[0])}: {unknown[0]} is no field of a model; {way_out}")
    lacking = [each for each in _FROM_ONE if each not in file.table]
    if lacking:
        raise ValueError(
            f"{file.source} lacks {', '.join(lacking)}; every model has {'it' if len(lacking) == 1 else 'them'}"
        )
    return ModelShape(**{"name": name, **file.table})
