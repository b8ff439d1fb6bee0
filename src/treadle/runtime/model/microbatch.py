"""The data of one micro-batch at one stage: what is put, and by which op it is taken."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor

from treadle.dist.boundary import Boundary
from treadle.dist.channel import refuse_reused, versions
from treadle.runtime.model.losses import OwnLoss
from treadle.runtime.model.side import Side

Tensors: TypeAlias = tuple[Tensor, ...]
Grads: TypeAlias = tuple[Tensor | None, ...]


class Microbatch:
    """One micro-batch at stage `stage`, within one step. In the order of a step:

        inputs         put by RECV_F, the feed of the first stage, or F of the stage before    taken by F
        target         put by the feed of the last stage, and of one with MTP blocks          taken by F
        side           put by the feed of every stage, read by F and what is computed again    stays
        outputs        put by F                                      taken by SEND_F, or F of the stage after
        losses         added by F
        output_grads   put by RECV_B, or B of the stage after                                  taken by B or I
        input_grads    put by B or I                                 taken by SEND_B, or B of the stage before

    "F of the stage before" puts directly where one rank holds both stages. Each is put once and taken once: who takes
    owns the tensors, so that memory is free when the taker is done. At layer granularity F and B are the first or the
    last of their parts. Lanes are threads, and none of these has a lock: ops that touch the same depend on each other.
    """

    __slots__ = (
        "_before",
        "_input_grads",
        "_inputs",
        "_output_grads",
        "_outputs",
        "_target",
        "_versions",
        "arrived",
        "boundary",
        "losses",
        "mb",
        "named",
        "side",
        "stage",
    )

    def __init__(self, stage: int, mb: int) -> None:
        self.stage, self.mb = stage, mb
        self.losses: list[OwnLoss] = []
        self.side: Side = {}
        """The side values of this micro-batch by name."""
        self.arrived: Boundary | None = None
        """The shapes of the inputs, where a message brought them."""
        self.boundary: Boundary | None = None
        """The shapes of the outputs, which those of their gradients are."""
        self.named: list[tuple[str, Tensor]] = []
        self._inputs: Tensors | None = None
        self._target: Any = None
        self._before: Microbatch | None = None
        self._outputs: Tensors | None = None
        self._versions: list[int] = []
        self._output_grads: Grads | None = None
        self._input_grads: Grads | None = None

    def put_inputs(self, inputs: Tensors) -> None:
        """Put what a forward starts from."""
        self._inputs = inputs

    def put_inputs_from(self, before: Microbatch) -> None:
        """Let the forward start from the outputs of the stage before, which stay there until then."""
        self._before = before

    def take_inputs(self) -> Tensors:
        """Return what a forward starts from."""
        before, self._before = self._before, None
        if before is not None:
            return before.take_outputs()
        inputs, self._inputs = self._inputs, None
        assert inputs is not None, f"{self} has its inputs before its forward runs"
        return inputs

    def put_target(self, target: Any) -> None:
        """Put what the loss function gets; None is a target too."""
        self._target = target

    def take_target(self) -> Any:
        """Return what the loss function gets."""
        target, self._target = self._target, None
        return target

    @property
    def target(self) -> Any:
        """The target, which stays for the loss function."""
        return self._target

    def given(self) -> tuple[Any, Any, Side]:
        """Return the user's own tensors, before a step runs: inputs, target and side values."""
        return self._inputs, self._target, self.side

    def put_outputs(self, outputs: Tensors, boundary: Boundary | None) -> None:
        """Put what a forward made, and its shapes. From here on it must not be written to."""
        self.boundary = boundary
        self._outputs, self._versions = outputs, versions(outputs)

    @property
    def outputs(self) -> Tensors:
        """The outputs, which stay."""
        assert self._outputs is not None, f"{self} has outputs behind its forward"
        return self._outputs

    def take_outputs(self) -> Tensors:
        """Return the outputs. Raise ValueError if they were written to since they were put."""
        outputs, self._outputs = self.outputs, None
        refuse_reused(outputs, self._versions, self.told())
        return outputs

    def put_output_grads(self, grads: Grads) -> None:
        """Put the gradients of the outputs; None for an output that nobody read."""
        self._output_grads = grads

    def take_output_grads(self) -> Grads:
        """Return the gradients of the outputs."""
        grads, self._output_grads = self._output_grads, None
        assert grads is not None, f"{self} has gradients of its outputs before its backward runs"
        return grads

    def put_input_grads(self, grads: Grads) -> None:
        """Put the gradients of the inputs that require one; None for an input that was not used."""
        self._input_grads = grads

    def take_input_grads(self) -> Grads:
        """Return the gradients of the inputs."""
        grads, self._input_grads = self._input_grads, None
        assert grads is not None, f"{self} has gradients of its inputs behind its backward"
        return grads

    def add_loss(self, own: OwnLoss) -> None:
        """Keep one of the losses. They may differ in type; the step adds them up in float64."""
        self.losses.append(OwnLoss(own.loss.detach(), own.aux))

    def note(self, name: str, loss: Tensor) -> None:
        """Keep a loss that is told by name, as it was before its weight."""
        self.named.append((name, loss))

    def told(self) -> str:
        """Return what errors call the outputs."""
        return f"the output of stage {self.stage} for micro-batch {self.mb}"

    def __str__(self) -> str:
        return f"micro-batch {self.mb} of stage {self.stage}"
