"""The names that a stage's tensors have in Hugging Face's checkpoints, and the parameters that stages share.

Experts are one parameter here and one tensor an expert and projection there. A copy of a shared parameter (a tied head,
the embedding and the head of MTP blocks) has the name of the original, so that it is loaded from there; a checkpoint
has each name once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from treadle.models.cut_stage import LMStage
from treadle.models.decoder_layers import DecoderLayer
from treadle.models.ends import LMHead, TokenEmbedding
from treadle.models.model_config import ModelConfig
from treadle.models.mtp import TokenPredictor
from treadle.models.views import NamedView
from treadle.moe.experts import Experts
from treadle.runtime.model.stage_blocks import children_of

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def views(module: nn.Module) -> list[NamedView]:
    """Return every parameter and persistent buffer of a stage under its Hugging Face name, each name once.

    Args:
        module: a stage of `build_stages` or `cut_causal_lm`.

    Raises:
        ValueError: a block that neither makes.

    """
    found: dict[str, NamedView] = {}
    for block in children_of(module):
        for view in _views_of_block(block):
            found.setdefault(view.name, view)
    return list(found.values())


def views_of_stages(stages: Mapping[int, nn.Module]) -> list[NamedView]:
    """Return the views of all chunks of a rank, each name once."""
    found: dict[str, NamedView] = {}
    for _, stage in sorted(stages.items()):
        for view in views(stage):
            found.setdefault(view.name, view)
    return list(found.values())


def tied_parameters(config: ModelConfig, rows: Sequence[str]) -> dict[str, dict[int, str]] | None:
    """Return the ties between stages, as `Pipeline(tied=...)` takes them; None where there are none.

    Args:
        config: the model's shape.
        rows: the block letters of each stage, as `build_stages` takes them.

    Example:
        >>> tied_parameters(ModelConfig(tie_word_embeddings=True), ("Ett", "ttL"))
        {'embedding': {0: '0.embed_tokens.weight', 1: '2.lm_head.weight'}}

    """
    places: dict[str, dict[int, str]] = {"embedding": {}, "head": {}}
    head = "embedding" if config.tie_word_embeddings else "head"
    for stage, row in enumerate(rows):
        if "E" in row:
            places["embedding"].setdefault(stage, "0.embed_tokens.weight")
        if "m" in row:
            places["embedding"].setdefault(stage, f"{row.index('m')}.embed_tokens.weight")
            places[head].setdefault(stage, f"{row.index('m')}.shared_head.head.weight")
        if "L" in row:
            places[head].setdefault(stage, f"{row.index('L')}.lm_head.weight")
    return {name: where for name, where in places.items() if len(where) > 1} or None


def share_parameters(stages: Sequence[nn.Module], config: ModelConfig) -> None:
    """Make the copies of a shared parameter on one rank one object."""
    blocks = [block for stage in stages for block in children_of(stage)]
    embeddings: list[nn.Embedding | nn.Linear] = []
    embeddings += [b.embed_tokens for b in blocks if isinstance(b, TokenEmbedding | TokenPredictor)]
    heads: list[nn.Embedding | nn.Linear] = [b.lm_head for b in blocks if isinstance(b, LMHead)]
    heads += [b.shared_head.head for b in blocks if isinstance(b, TokenPredictor)]
    for alike in [[*embeddings, *heads]] if config.tie_word_embeddings else [embeddings, heads]:
        for copy in alike[1:]:
            copy.weight = alike[0].weight


def _views_of_block(block: nn.Module) -> Iterator[NamedView]:
    experts = {name: part for name, part in block.named_modules() if isinstance(part, Experts)}
    for name, tensor in _tensors_of(block):
        owner = name.rpartition(".")[0].rpartition(".")[0]
        if owner in experts:
            yield from _expert_views(_full_name(block, owner), experts[owner], name, tensor)
        else:
            yield NamedView(_full_name(block, name), tensor)


def _tensors_of(block: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from block.named_parameters(remove_duplicate=False)
    for prefix, part in block.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _expert_views(prefix: str, experts: Experts, name: str, tensor: Tensor) -> Iterator[NamedView]:
    """Yield a view for each expert and projection; `up` has the rows of gate_proj before those of up_proj."""
    width = tensor.shape[1] // 2
    for at in range(len(experts)):
        expert = f"{prefix}.{experts.first + at}"
        if name.endswith("down.weight"):
            yield NamedView(f"{expert}.down_proj.weight", tensor, (at,))
        else:
            yield NamedView(f"{expert}.gate_proj.weight", tensor, (at, slice(0, width)))
            yield NamedView(f"{expert}.up_proj.weight", tensor, (at, slice(width, 2 * width)))


def _full_name(block: nn.Module, name: str) -> str:
    """Return the name in the whole model of what is `name` in a block."""
    if isinstance(block, TokenEmbedding):
        return f"model.{name}"
    if isinstance(block, LMHead):
        return _head_name(tied=block.tied) if name == "lm_head.weight" else f"model.{name}"
    if isinstance(block, TokenPredictor):
        shared = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": _head_name(tied=block.tied)}
        return shared.get(name, f"model.layers.{block.number}.{name.removeprefix('layer.')}")
    if isinstance(block, DecoderLayer):
        return f"model.layers.{block.number}.{name.replace('.gate.score.', '.gate.')}"
    if isinstance(block, LMStage):
        own = name.removeprefix("model.")
        return block.shared.get(own, own)
    raise ValueError(
        f"{type(block).__name__} is no block of build_stages, so it has no name in a Hugging Face checkpoint; pass a "
        "stage that build_stages or cut_causal_lm made"
    )


def _head_name(*, tied: bool) -> str:
    return EMBEDDING if tied else HEAD
