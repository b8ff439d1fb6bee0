"""The shape of a model, in Hugging Face's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from treadle.models import architectures
from treadle.moe.router import Scoring

TRAINING_FIELDS = ("router_aux_loss_coef", "bias_update_rate", "mtp_loss_weight")
"""Fields that only training reads: no logit depends on them."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder: grouped-query attention with q/k norms, RMSNorm, rotary positions, gated MLPs or experts.

    With `num_experts` 0 it is Qwen3; with `scoring="softmax"` Qwen3-MoE; with `scoring="sigmoid"` the router and the
    shared expert are DeepSeek-V3's after Qwen3's attention (in transformers: Dots1).

    Raises:
        ValueError: sizes that do not fit each other, or that no architecture of transformers has.

    Example:
        >>> config = ModelConfig(num_hidden_layers=3, first_k_dense_replace=1, scoring="sigmoid", n_shared_experts=1)
        >>> config.blocks, config.to_hf()["architectures"]
        ('EdttL', ['Dots1ForCausalLM'])
        >>> ModelConfig.from_hf(config.to_hf()) == config
        True

    """

    vocab_size: int = 257
    """By default bytes, and the end of a document."""

    hidden_size: int = 64
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 192
    """Width of a dense layer's MLP, and of an MTP block's."""

    moe_intermediate_size: int = 64
    num_experts: int = 8
    num_experts_per_tok: int = 2
    norm_topk_prob: bool = True
    first_k_dense_replace: int = 0
    """How many of the first layers are dense ones."""

    n_shared_experts: int = 0
    """The width of the expert that every token passes, in `moe_intermediate_size`s. Only with sigmoid scoring."""

    scoring: Scoring = "softmax"
    routed_scaling_factor: float = 1.0
    """What the gates are multiplied by. Only with sigmoid scoring."""

    n_group: int = 1
    topk_group: int = 1
    """A token's experts are in the best `topk_group` of `n_group` groups of experts. Only with sigmoid scoring."""

    router_aux_loss_coef: float = 0.0
    """The weight of the balance loss of each layer and micro-batch. 0: there is none."""

    bias_update_rate: float = 0.0
    """How far `update_bias` moves the bias of an expert in a step. Only with sigmoid scoring."""

    num_nextn_predict_layers: int = 0
    """MTP blocks: each predicts one more token."""

    mtp_loss_weight: float = 0.3
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768
    """Said to those who load the model; nothing here depends on it."""

    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        _check_sizes(self)
        if self.num_experts:
            _check_experts(self)

    @property
    def num_dense_layers(self) -> int:
        """The number of layers without experts; they come first."""
        return min(self.first_k_dense_replace, self.num_hidden_layers) if self.num_experts else self.num_hidden_layers

    @property
    def blocks(self) -> str:
        """The letters of all blocks in order (`treadle.ir.blocks`): what stages are cut from.

        Example:
            >>> ModelConfig(num_hidden_layers=2, num_experts=0, num_nextn_predict_layers=1).blocks
            'EddmL'

        """
        num_dense = self.num_dense_layers
        layers = "d" * num_dense + "t" * (self.num_hidden_layers - num_dense)
        return f"E{layers}{'m' * self.num_nextn_predict_layers}L"

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> ModelConfig:
        """Read a Hugging Face config.

        Args:
            source: the config as a mapping, its file, or the directory that has a `config.json`.

        Returns:
            The ModelConfig.

        Raises:
            ValueError: another architecture, or a setting of it that is not here; the message names it.

        """
        return cls(**architectures.fields_of(architectures.read(source)))

    def differences(self, other: ModelConfig) -> dict[str, tuple[Any, Any]]:
        """Return the fields in which another config is another model, with both values.

        Example:
            >>> ModelConfig().differences(ModelConfig(rope_theta=1e6, router_aux_loss_coef=0.01))
            {'rope_theta': (10000.0, 1000000.0)}

        """
        names = (field.name for field in fields(self) if field.name not in TRAINING_FIELDS)
        both = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return {name: (own, others) for name, (own, others) in both.items() if own != others}

    def to_hf(self) -> dict[str, Any]:
        """Return the config as transformers reads it: the content of a `config.json`."""
        return architectures.hf_config_of(asdict(self), self.num_dense_layers)


def _check_sizes(config: ModelConfig) -> None:
    positive = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    for name in positive:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is at least 1, got {getattr(config, name)}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"{config.num_attention_heads} attention heads do not share {config.num_key_value_heads} key-value heads "
            "evenly; num_attention_heads is a multiple of num_key_value_heads"
        )
    if config.head_dim % 2:
        raise ValueError(f"head_dim is even, as rotary positions turn pairs of numbers, got {config.head_dim}")
    if (config.num_dense_layers or config.num_nextn_predict_layers) and config.intermediate_size < 1:
        raise ValueError(f"intermediate_size is at least 1 for dense layers and MTP, got {config.intermediate_size}")
    if min(config.num_experts, config.num_nextn_predict_layers, config.first_k_dense_replace) < 0:
        raise ValueError("num_experts, num_nextn_predict_layers and first_k_dense_replace are 0 or more")


def _check_experts(config: ModelConfig) -> None:
    if config.scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring is softmax or sigmoid, got {config.scoring!r}")
    if not 1 <= config.num_experts_per_tok <= config.num_experts:
        raise ValueError(
            f"a token goes to 1 to {config.num_experts} of {config.num_experts} experts, got num_experts_per_tok "
            f"{config.num_experts_per_tok}"
        )
    if config.moe_intermediate_size < 1:
        raise ValueError(f"moe_intermediate_size is at least 1, got {config.moe_intermediate_size}")
    if config.scoring == "softmax":
        _check_softmax(config)
    else:
        _check_groups(config)


def _check_softmax(config: ModelConfig) -> None:
    """Refuse settings of the sigmoid router. Qwen3-MoE, which a softmax model is saved as, has none of them."""
    only = {"n_shared_experts": 0, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "bias_update_rate": 0.0}
    for name, allowed in only.items():
        if getattr(config, name) != allowed:
            raise ValueError(
                f"{name} belongs to the sigmoid router, got {getattr(config, name)} with scoring 'softmax'; set "
                f"scoring='sigmoid' or leave {name} at {allowed}"
            )


def _check_groups(config: ModelConfig) -> None:
    if config.n_group < 1 or config.num_experts % config.n_group or config.num_experts < 2 * config.n_group:
        raise ValueError(
            f"{config.num_experts} experts do not make {config.n_group} groups of equal size with at least 2 each; "
            "change n_group"
        )
    if not 1 <= config.topk_group <= config.n_group:
        raise ValueError(f"topk_group is 1 to n_group ({config.n_group}), got {config.topk_group}")
    reached = config.topk_group * config.num_experts // config.n_group
    if config.num_experts_per_tok > reached:
        raise ValueError(
            f"{config.topk_group} of {config.n_group} groups have {reached} experts, fewer than num_experts_per_tok "
            f"({config.num_experts_per_tok}); raise topk_group"
        )
