"""The adapter of Hugging Face transformers: a model behind a gate, its weights under the names of its checkpoint.

    engine = Transformers(AutoModelForCausalLM.from_pretrained(...))
    with Endpoint(engine, directory, worker=0):
        version, tokens = engine.generate(input_ids, max_new_tokens=32)

transformers 5 holds the experts of a layer in one tensor; its checkpoints have one for each expert. `named_weights`
makes views under the checkpoint's names, so that trainer, checkpoint and engine name the same tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from treadle.update.adapters.plain import Plain, digest_of
from treadle.update.worker.gate import Gate

_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """View of a model's weights by the names of its checkpoint; of tied tensors, the first."""
    state = model.state_dict(keep_vars=True)
    named: dict[str, torch.Tensor] = {}
    for first, *_ in _by_place(state):
        named.update(_by_expert(first, state[first].detach()))
    return named


def tied_names(model: nn.Module) -> dict[str, str]:
    """Names of the checkpoint that `named_weights` leaves out, and of each the name that it has instead."""
    state = model.state_dict(keep_vars=True)
    tied: dict[str, str] = {}
    for first, *others in _by_place(state):
        for other in others:
            pairs = zip(_by_expert(other, state[other]), _by_expert(first, state[first]), strict=True)
            tied.update((name, taken) for (name, _), (taken, _) in pairs)
    return tied


def _by_place(state: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of each tensor; tied tensors are one."""
    places: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in state.items():
        places.setdefault(_place(tensor), []).append(name)
    return list(places.values())


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """A key that tied tensors share. Without memory here (an empty shard, meta) tied tensors are one object."""
    plain = tensor.detach()
    local = plain.to_local() if isinstance(plain, DTensor) else plain
    if not local.numel() or local.is_meta or not local.data_ptr():
        return (id(tensor),)
    return local.data_ptr(), local.dtype, tensor.shape, local.shape, local.stride()


def _by_expert(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    fused = _FUSED.fullmatch(name)
    if fused is None or tensor.dim() != 3:
        yield name, tensor
        return
    experts, part = fused.groups()
    for expert, weight in enumerate(tensor):
        if part == "down_proj":
            yield f"{experts}.{expert}.down_proj.weight", weight
        else:
            gate, up = weight.chunk(2)
            yield f"{experts}.{expert}.gate_proj.weight", gate
            yield f"{experts}.{expert}.up_proj.weight", up


class Transformers(Plain):
    """A model that generates. An update waits for requests to end, or breaks them off after their next token."""

    def __init__(self, model: Any) -> None:
        super().__init__(named_weights(model), tied=tied_names(model))
        self.model = model

    def generate(self, *args: Any, **options: Any) -> tuple[int, Any]:
        """The version, and what the model's `generate` returns. Raises ClosedError. A request broken off ends early."""
        from transformers import StoppingCriteriaList

        stopping = StoppingCriteriaList([*options.pop("stopping_criteria", ()), _Hurry(self.gate)])
        with self.gate.serving() as version, torch.no_grad():
            return version, self.model.generate(*args, stopping_criteria=stopping, **options)

    def finish(self) -> str | None:
        """Tie weights again. Fails where that moved a tensor: the engine would serve other weights than were loaded."""
        self.model.tie_weights()
        now = named_weights(self.model)
        moved = [name for name, held in self.held.items() if name not in now or now[name].data_ptr() != held.data_ptr()]
        return f"{', '.join(moved[:4])} moved in memory when weights were tied" if moved else None

    def digest(self) -> str:
        """A digest of the weights, after they were tied."""
        return digest_of(self.held)

    def invalidate(self) -> str | None:
        """Drop the static key-value cache that `generate` keeps between calls."""
        for name in ("_cache", "_static_cache"):
            if getattr(self.model, name, None) is not None:
                setattr(self.model, name, None)
        return None


class _Hurry:
    """Stop generation when an update breaks requests off."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.gate.hurry, dtype=torch.bool, device=input_ids.device)
