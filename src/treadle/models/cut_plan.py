"""Where a causal model of transformers can be cut: its list of layers, and what runs before and after them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from treadle.models.cut_stage import EarlierLayer, LaterModule, LMStage, NoEmbedding, StageInput

PROBED_TOKENS = 4
TOLERANCE = 1e-3
"""How far logits may be from the model's own, as a part of the largest; a wrong cut is far beyond."""


@dataclass(frozen=True)
class CutPlan:
    """Where a model's layers are, and what runs before and after them.

    `path` are the names from the model to the list of its layers; `before` and `behind` the full names of modules
    beside that path which have parameters.
    """

    model: nn.Module
    path: tuple[str, ...]
    layers: nn.ModuleList
    before: tuple[str, ...]
    behind: tuple[str, ...]
    in_tuple: bool
    shared: dict[str, str]
    separates_documents: bool

    @property
    def num_layers(self) -> int:
        """The number of layers of the whole model."""
        return len(self.layers)

    @classmethod
    def of(cls, model: nn.Module) -> CutPlan:
        """Find the layers, and run a few tokens to see what is called when."""
        name, layers = _find_layers(model)
        path = tuple(name.split("."))
        _refuse_own_parameters(model, path)
        beside = _beside(model, path)
        shared = shared_names(model)
        calls = _Calls(beside, layers)
        with calls.noted(), evaluating(model), torch.no_grad():
            model(input_ids=probe_tokens(model), use_cache=False)
        between = [name for name in calls.between if _has_parameters(beside[name])]
        if between:
            raise ValueError(
                f"{type(model).__name__} calls {between[0]}, which has parameters, between its layers, so it belongs "
                "to no one stage; write stages of your own"
            )
        before = tuple(name for name in calls.before if _has_parameters(beside[name]))
        behind = tuple(name for name in beside if name not in calls.before and _has_parameters(beside[name]))
        return cls(model, path, layers, before, behind, calls.in_tuple, shared, _separates_documents(model))

    def stage(self, begin: int, end: int, num_stages: int, at: int) -> LMStage:
        """Return the stage with layers `begin` to `end - 1`."""
        given = StageInput()
        shell = _shell(self.model, self.path)
        layers: list[nn.Module] = []
        for number, layer in enumerate(self.layers):
            if number < begin:
                layers.append(EarlierLayer(layer, given, in_tuple=self.in_tuple))
            elif number < end:
                layers.append(_entering(layer, given) if number == 0 and at > 0 else layer)
            else:
                layers.append(LaterModule(layer))
        shell.get_submodule(".".join(self.path[:-1]))._modules[self.path[-1]] = nn.ModuleList(layers)
        for name in self.before if at > 0 else ():
            module = self.model.get_submodule(name)
            _put(shell, name, NoEmbedding() if isinstance(module, nn.Embedding) else nn.Identity())
        for name in self.behind if at < num_stages - 1 else ():
            _put(shell, name, LaterModule(self.model.get_submodule(name)))
        return LMStage(shell, given, self.shared, is_first=at == 0, separates_documents=self.separates_documents)


class _Calls:
    """Notes which of the modules beside the layers are called before the first, after the last, and in between."""

    def __init__(self, beside: Mapping[str, nn.Module], layers: nn.ModuleList) -> None:
        self.before: list[str] = []
        self.between: list[str] = []
        self.in_tuple = False
        self._beside, self._layers = beside, layers
        self._num_done = -1

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the calls within the block."""
        hooks = [m.register_forward_pre_hook(self._noting(name)) for name, m in self._beside.items()]
        hooks.append(self._layers[0].register_forward_pre_hook(self._begin))
        hooks += [layer.register_forward_hook(self._end) for layer in self._layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _noting(self, name: str) -> Any:
        def note(*_: Any) -> None:
            if self._num_done < 0:
                self.before.append(name)
            elif self._num_done < len(self._layers):
                self.between.append(name)

        return note

    def _begin(self, *_: Any) -> None:
        self._num_done = 0

    def _end(self, _module: nn.Module, _args: Any, made: Any) -> None:
        self._num_done += 1
        self.in_tuple = isinstance(made, tuple)


def _find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the longest list of modules, with its name."""
    lists = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part)]
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of layers (nn.ModuleList) to cut; write stages of your own"
        )
    return max(lists, key=lambda found: (len(found[1]), -found[0].count(".")))


def _beside(model: nn.Module, path: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules beside the path to the layers, by name."""
    found: dict[str, nn.Module] = {}
    for depth, step in enumerate(path):
        prefix = ".".join(path[:depth])
        for name, child in model.get_submodule(prefix).named_children():
            if name != step:
                found[f"{prefix}.{name}" if prefix else name] = child
    return found


def _refuse_own_parameters(model: nn.Module, path: Sequence[str]) -> None:
    for depth in range(len(path)):
        prefix = ".".join(path[:depth])
        for name, _ in model.get_submodule(prefix).named_parameters(recurse=False):
            raise ValueError(
                f"{type(model).__name__} has the parameter {name} in {prefix or 'itself'}, around its layers, so it "
                "belongs to no one stage; write stages of your own"
            )


def shared_names(model: nn.Module) -> dict[str, str]:
    """Return {name of the head: name of the embedding} where they are one parameter; other sharing is refused."""
    first: dict[nn.Parameter, str] = {}
    shared: dict[str, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param in first:
            shared[name] = first[param]
        first.setdefault(param, name)
    whole: Any = model
    tied = whole.get_input_embeddings().weight
    for name, original in shared.items():
        if model.get_parameter(name) is not tied or len(shared) > 1:
            raise ValueError(
                f"{type(model).__name__} has one parameter as {original} and {name}; only embedding and head may be "
                "one; write stages of your own"
            )
    return shared


def _separates_documents(model: nn.Module) -> bool:
    """Return whether the second of two documents in a sequence has the logits that it has alone.

    Its logits have no gradient at the embeddings of the first: exactly none, however small the weights are.
    """
    accepted = inspect.signature(model.forward).parameters
    second = probe_tokens(model)[:, : PROBED_TOKENS // 2]
    if "position_ids" not in accepted or second.device.type == "meta":
        return "position_ids" in accepted
    positions = torch.arange(second.shape[1], device=second.device).repeat(2).unsqueeze(0)
    rows = torch.cat([1 - second, second], 1)
    with evaluating(model), torch.enable_grad(), _leaves_of_embedding(model) as embedded:
        packed = model(input_ids=rows, position_ids=positions, use_cache=False).logits[:, second.shape[1] :]
        (reached,) = torch.autograd.grad(packed.square().sum(), embedded[:1], allow_unused=True)
    with evaluating(model), torch.no_grad():
        alone = model(input_ids=second, use_cache=False).logits
        together = apart(packed, alone) <= TOLERANCE
    return together and (reached is None or not reached[:, : second.shape[1]].any())


@contextmanager
def _leaves_of_embedding(model: nn.Module) -> Iterator[list[Tensor]]:
    """Make what the embedding returns in the block leaves of the graph, and list it."""
    leaves: list[Tensor] = []

    def cut(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    whole: Any = model
    hook = whole.get_input_embeddings().register_forward_hook(cut)
    try:
        yield leaves
    finally:
        hook.remove()


def apart(logits: Tensor, expected: Tensor) -> float:
    """Return the largest difference, as a part of the largest logit."""
    return float((logits - expected).abs().max() / expected.abs().max())


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _shell(model: nn.Module, path: Sequence[str]) -> nn.Module:
    """Return a model with modules of its own along the path, and all others shared."""
    shell = copy.copy(model)
    shell._modules = dict(model._modules)
    if len(path) > 1:
        child = model._modules[path[0]]
        assert child is not None
        shell._modules[path[0]] = _shell(child, path[1:])
    return shell


def _put(shell: nn.Module, name: str, module: nn.Module) -> None:
    prefix, _, last = name.rpartition(".")
    shell.get_submodule(prefix)._modules[last] = module


def _entering(layer: nn.Module, given: StageInput) -> nn.Module:
    """Return the model's first layer as that of a stage which has no embedding: it reads the stage's input."""
    entering = copy.copy(layer)

    def forward(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("hidden_states", None)
        return layer.forward(given.x, *args[1:], **kwargs)

    entering.forward = forward
    return entering


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Switch dropout off for the block."""
    parts = {part: part.training for module in modules for part in module.modules()}
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part, training in parts.items():
            part.training = training


def probe_tokens(model: nn.Module) -> Tensor:
    """Return a few tokens that every vocabulary has."""
    device = next(model.parameters()).device
    return torch.arange(PROBED_TOKENS, device=device).unsqueeze(0) % 2
