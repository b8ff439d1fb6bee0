"""A stage of a causal model of transformers, and what stands in it for modules of other stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from treadle.models.document_lengths import Documents


class LMStage(nn.Module):
    """A stage of a causal model: `model` is the model without what belongs to other stages."""

    def __init__(
        self,
        model: nn.Module,
        given: StageInput,
        shared: Mapping[str, str],
        *,
        is_first: bool,
        separates_documents: bool = True,
    ) -> None:
        super().__init__()
        self.model, self.is_first, self.separates_documents = model, is_first, separates_documents
        self.shared = dict(shared)
        """Names of parameters that are copies of another one, and the name of that."""
        self._given = given

    def forward(self, x: Tensor, positions: Tensor | None = None, documents: Documents | None = None) -> Tensor:
        """Run the stage.

        Args:
            x: tokens [batch, tokens] in the first stage, else what the stage before returned.
            positions: [batch, tokens]; a document begins where they begin again from 0. transformers' masks follow.
            documents: the documents of each sequence: another way to give the positions.

        Returns:
            The logits in the last stage, else what the next stage takes.

        Raises:
            ValueError: several documents in a sequence, where transformers' masks of this model do not follow.

        """
        if positions is None and documents is not None:
            positions = documents.positions(x.device)
        if positions is not None and not self.separates_documents:
            self._refuse_documents(positions)
            positions = None
        known = {} if positions is None else {"position_ids": positions}
        tokens = {"input_ids": x} if self.is_first else {"inputs_embeds": x.detach()}  # replaced before any layer
        self._given.x = x
        try:
            logits: Tensor = self.model(**tokens, **known, use_cache=False).logits
        except EndOfStageError as end:
            return end.x
        finally:
            self._given.x = None
        return logits

    def _refuse_documents(self, positions: Tensor) -> None:
        whole = torch.arange(positions.shape[-1], device=positions.device)
        if bool((positions != whole).any()):
            raise ValueError(
                f"{type(self.model).__name__} does not keep the documents of a sequence apart by their positions; give "
                "one document a sequence"
            )


class EndOfStageError(Exception):
    """Leaves the model's forward with what the next stage takes."""

    def __init__(self, x: Tensor) -> None:
        super().__init__("the end of a stage")
        self.x = x


class StageInput:
    """What a stage was called with, while it runs."""

    x: Tensor | None = None


class EarlierLayer(nn.Module):
    """Stands for a layer of an earlier stage: returns what that stage sent."""

    def __init__(self, layer: nn.Module, given: StageInput, *, in_tuple: bool) -> None:
        super().__init__()
        _take_attributes(self, layer)
        self._given, self._in_tuple = given, in_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the stage's input, as the layer would return its output."""
        return (self._given.x,) if self._in_tuple else self._given.x


class LaterModule(nn.Module):
    """Stands for a layer of a later stage, or for what follows all layers: ends the stage."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        _take_attributes(self, module)

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Raise with what this module would have got."""
        raise EndOfStageError(args[0] if args else kwargs["hidden_states"])


class NoEmbedding(nn.Module):
    """Stands for an embedding of the first stage. What is made of it never reaches a layer."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return a zero, which can be added to anything."""
        found = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return torch.zeros((), device=found.device)


def _take_attributes(stand_in: nn.Module, module: nn.Module) -> None:
    """Give a stand-in the plain attributes of its original, such as a layer's attention type."""
    stand_in.__dict__.update({name: value for name, value in vars(module).items() if not name.startswith("_")})
