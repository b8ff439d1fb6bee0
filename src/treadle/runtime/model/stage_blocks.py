"""The blocks of a stage: embedding, layers, MTP blocks and head, found in its module and told in letters.

E   the embedding: plain modules before all layers, on the first stage
d   a layer that names its segments, without an exchange of tokens
t   one with an exchange
m   an MTP block
L   the head with the loss: the last stage has it, even where there is nothing but the loss
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from treadle.runtime.model.calling import has_hooks
from treadle.runtime.model.mtp_block import MTPBlock
from treadle.runtime.model.segments import Plan, is_segmented
from treadle.runtime.model.side import Keywords
from treadle.runtime.model.weight_grad import own_forward


class Blocks(NamedTuple):
    """The modules of a stage by what they are."""

    embedding: list[nn.Module]
    layers: list[Any]
    mtp: list[MTPBlock]
    head: list[nn.Module]


def children_of(module: nn.Module) -> list[nn.Module]:
    """Returns the modules of a stage in order: those of an `nn.Sequential`, or the one module."""
    return list(module) if isinstance(module, nn.Sequential) else [module]


def parts_of(module: nn.Module, stage: int) -> Blocks:
    """Returns the modules of a stage by what they are. Plain modules alone are an embedding or, behind, a head."""
    children = children_of(module)
    named = ["t" if is_segmented(child) else "m" if isinstance(child, MTPBlock) else "" for child in children]
    inner = [at for at, letter in enumerate(named) if letter]
    if not inner:
        return Blocks(children, [], [], []) if stage == 0 else Blocks([], [], [], children)
    first, last = inner[0], inner[-1]
    plain = [type(child).__name__ for child, letter in zip(children, named, strict=True) if not letter]
    if not all(named[first : last + 1]):
        raise ValueError(
            f"stage {stage} has plain modules ({', '.join(plain)}) between layers that name their segments, or between "
            "these and its MTP blocks"
        )
    if sorted(named[first : last + 1], reverse=True) != named[first : last + 1]:
        at = named.index("m")
        raise ValueError(
            f"stage {stage} has {type(children[at]).__name__}, an MTP block, before its last layer; put it after all "
            "layers"
        )
    num_layers = named.count("t")
    return Blocks(
        children[:first],
        children[first : first + num_layers],
        [child for child in children if isinstance(child, MTPBlock)],
        children[last + 1 :],
    )


def is_layered(module: nn.Module) -> bool:
    """Returns whether a stage has layers that name their segments, or MTP blocks."""
    return any(is_segmented(child) or isinstance(child, MTPBlock) for child in children_of(module))


def refuse_uncalled(module: nn.Module, where: str) -> None:
    """Refuses what nothing would call: hooks and replaced `forward`s where the segments of layers run instead.

    So it is for layers that name their segments and for the `nn.Sequential` around them. `where` begins the error.
    """
    if isinstance(module, nn.Sequential) and type(module).forward is not nn.Sequential.forward:
        raise ValueError(
            f"{where} is a {type(module).__name__}, whose own forward nothing calls: its layers name their segments, "
            "and these run instead. Give an nn.Sequential, and move what its forward does into a layer"
        )
    uncalled: list[Any] = [module] if isinstance(module, nn.Sequential) else []
    uncalled += [child for child in children_of(module) if is_segmented(child)]
    for part in uncalled:
        if has_hooks(part) or own_forward(part) is not None:
            _refuse(part, module, where)


_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}


def _refuse(part: nn.Module, module: nn.Module, where: str) -> None:
    at = next((name for name, child in module.named_children() if child is part), "")
    what = next((told for name, told in _HOOKS.items() if getattr(part, name)), "a forward that replaces its own")
    named = f"{where}, its module {at} ({type(part).__name__})" if at else f"{where} ({type(part).__name__})"
    raise ValueError(
        f"{named} has {what}, which nothing calls: segments of layers run instead. Put hooks on modules that segments "
        "call, such as a layer's mixer or experts, or into the segments themselves, and remove this one"
    )


def blocks_of(module: nn.Module, stage: int, num_stages: int) -> str:
    """Returns the letters of a stage; of plain modules alone "E" on the first, "L" on the last stage, "" elsewhere."""
    parts = parts_of(module, stage)
    layers = "".join("t" if has_exchange(layer) else "d" for layer in parts.layers)
    embedding = "E" if parts.embedding and stage == 0 else ""
    return embedding + layers + "m" * len(parts.mtp) + ("L" if stage == num_stages - 1 else "")


def modules_of_blocks(module: nn.Module, stage: int, num_stages: int) -> list[list[nn.Module]]:
    """Returns the modules of each block of a stage whose parameters it is the first to read, in the order of letters.

    An MTP block may read the head's, which comes after it.
    """
    parts = parts_of(module, stage)
    embedding = [parts.embedding] if parts.embedding and stage == 0 else []
    blocks = [*embedding, *([layer] for layer in parts.layers), *([block] for block in parts.mtp)]
    if stage < num_stages - 1:
        return blocks
    if parts.mtp:
        blocks[len(embedding) + len(parts.layers)] += parts.head
    return [*blocks, parts.head]


def segments_of(layer: Any, where: str) -> tuple[str, ...]:
    """Returns the names of a layer's segments. Raises ValueError where they cannot run."""
    return tuple(Plan.of(layer, where).segments)


def has_exchange(layer: Any) -> bool:
    """Returns whether a layer exchanges tokens."""
    return any(segment.name == "dispatch" for segment in layer.segments())


def side_names(module: nn.Module) -> set[str]:
    """Returns the names of the side values that a layer, an MTP block or a plain module could read."""
    if is_segmented(module):
        return set(Plan.of(module, type(module).__name__).side)
    return Keywords(module).names(2 if isinstance(module, MTPBlock) else 1)
