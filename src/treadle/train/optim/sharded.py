"""An optimizer whose state is divided among the ranks that hold the same parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from treadle.models.views import NamedView
from treadle.runtime import Pipeline
from treadle.runtime.model.gradient_bucket import GradientBucket, Owned
from treadle.runtime.model.parameter_bucket import DividedBuckets, ParameterBucket
from treadle.train.checkpoint.tensor_parts import State, TensorPart
from treadle.train.optim.batched_muon import BatchedMuon
from treadle.train.optim.division import Run, cut_blocks, divide_elements, divide_whole
from treadle.train.optim.holdings import Holdings, TensorFamily
from treadle.train.optim.optimizer_config import OptimizerConfig
from treadle.train.optim.pieces import OwnedPiece

PREFIX = "optim."
"""Names of the optimizer's state in a checkpoint: optim.exp_avg.model.norm.weight is of model.norm.weight."""

_STEP = "step"


class ShardedOptimizer:
    """AdamW, or Muon for matrices, over a pipeline's parameters, whose gradients `pipe.step` has reduced.

    Ranks that hold the same parameters each update a part of them, and have reduced gradients, moments and float32
    masters for that part only; the next step gathers the other parts, bucket by bucket, in front of the forwards that
    read them. From then on `pipe.step` leaves `.grad` None: main
    gradients, float32 for parameters of two bytes, stay in the pipeline's buckets. The result is that of
    `torch.optim.AdamW` in one process, which does the arithmetic here, too, and of `torch.optim.Muon` but for rounding:
    matrices of one shape share its iterations. A parameter without a gradient is left as it is, as torch does.

    Args:
        pipe: The pipeline, made with all parameters in place.
        views: All parameters and buffers of this rank's stages under their names in the whole model.
        config: Which optimizer, with what.

    Raises:
        ValueError: On all ranks, if one's views do not fit its parameters or the other ranks' views.

    Example:
        A pipeline of one rank; with more, each has its part of the state.

        >>> import torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> import treadle
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        >>> stage, schedule = nn.Linear(4, 4), treadle.generate("1f1b", pp=1, microbatches=2)
        >>> pipe = treadle.Pipeline({0: stage}, schedule, mesh=mesh, loss_fn=nn.functional.mse_loss)
        >>> views = [NamedView(f"linear.{name}", param) for name, param in stage.named_parameters()]
        >>> optimizer = ShardedOptimizer(pipe, views)
        >>> for step in range(3):
        ...     loss = pipe.step(torch.randn(4, 4), torch.randn(4, 4))
        ...     norm = optimizer.clip(1.0)
        ...     optimizer.step(lr=1e-3)
        ...     optimizer.zero_grad()
        >>> optimizer.state_bytes  # two moments of 20 elements in float32
        160
        >>> pipe.close()
        >>> dist.destroy_process_group()

    """

    def __init__(self, pipe: Pipeline, views: Sequence[NamedView], config: OptimizerConfig | None = None) -> None:
        self.config = config if config is not None else OptimizerConfig()
        self._pipe = pipe
        self._holdings = Holdings.of(pipe, views)
        self._by_adamw: list[OwnedPiece] = []
        self._by_muon: list[OwnedPiece] = []
        self._loads: dict[int, list[int]] = {}
        pipe.divide(self._divide_all())
        self._adamw, self._muon = self._make_adamw(), self._make_muon()

    # -- making it ---------------------------------------------------------------------------------------------------

    def _divide_all(self) -> DividedBuckets:
        """Divide all tensors into buckets that follow the blocks of their stage, in the order of a backward."""
        families = self._holdings.families
        sizes: dict[int, dict[int, int]] = {stage: {} for stage in range(len(self._pipe.modules))}
        for family in families:
            for view, block in zip(family.views, family.blocks, strict=True) if family.chunk is not None else ():
                of_chunk = sizes[family.chunk]  # type: ignore[index]
                of_chunk[block] = of_chunk.get(block, 0) + view.of(view.tensor).numel() * view.tensor.itemsize
        made = DividedBuckets({chunk: cut_blocks(sizes[chunk], self._bucket_bytes) for chunk in sizes})
        for family in families:
            firsts = made.firsts[family.chunk] if family.chunk is not None and not family.is_shared else (0,)
            for number, views in enumerate(family.cut(firsts)):
                gathered: list[ParameterBucket] = []
                reduced = list(self._divide(family, views, gathered))
                if family.chunk is None:
                    made.tied_gradients.setdefault(family.tie or 0, []).extend(reduced)
                else:
                    place = family.chunk, len(made.firsts[family.chunk]) - 1 if family.is_shared else number
                    made.gradients.setdefault(place, []).extend(reduced)
                if family.chunk is None or family.is_shared:
                    made.tied_parameters.extend(gathered)
                else:
                    made.parameters.setdefault((family.chunk, number), []).extend(gathered)
        return made

    @property
    def _bucket_bytes(self) -> int:
        return max(1, int(self.config.bucket_mb * 2**20))

    def _divide(
        self, family: TensorFamily, held: Sequence[NamedView], gathered: list[ParameterBucket]
    ) -> Iterator[GradientBucket]:
        """Divide tensors of a family into pieces, by elements for AdamW, by whole matrices for Muon; yield buckets."""
        bucket = max(1, self._bucket_bytes // family.dtype.itemsize)
        whole = [self.config.by_muon(view.name, view.of(view.tensor).dim()) for view in held]
        loads = self._loads.setdefault(id(family), [0] * family.num_ranks)
        for is_matrix, divide, pieces in (
            (False, divide_elements, self._by_adamw),
            (True, partial(divide_whole, loads=loads), self._by_muon),
        ):
            views = [view for view, by_muon in zip(held, whole, strict=True) if by_muon is is_matrix]
            for shares in divide([view.of(view.tensor).numel() for view in views], family.num_ranks, bucket):
                rows = [self._elements(runs, views) for runs in shares]
                gradients = GradientBucket(rows, family.group)
                yield gradients
                at = 0
                for run in shares[family.number]:
                    pieces.append(OwnedPiece.of(views[run.tensor], run, gradients, at, is_matrix=is_matrix))
                    at += len(run)
                if family.group is not None:
                    gathered.append(ParameterBucket(rows, family.group))

    def _elements(self, runs: Sequence[Run], views: Sequence[NamedView]) -> Owned:
        """Return the elements of runs, in their parameters; the objects of a tied parameter are one."""
        found = []
        for run in runs:
            view = views[run.tensor]
            assert isinstance(view.tensor, nn.Parameter), "it trains"
            found.append((self._holdings.objects_of(view.tensor), view.run[0] + run.first, view.run[0] + run.last))
        return found

    def _make_adamw(self) -> torch.optim.AdamW:
        config = self.config
        by_decay: dict[float, list[Tensor]] = {config.decay_of(2): [], config.decay_of(1): []}
        for piece in self._by_adamw:
            by_decay[config.decay_of(piece.view.of(piece.view.tensor).dim())].append(piece.master)
        groups = [{"params": params, "weight_decay": decay} for decay, params in by_decay.items()]
        fused = {piece.master.device.type for piece in self._by_adamw} == {"cuda"}
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=config.eps, fused=fused or None)
        for piece in self._by_adamw:
            counted_on = piece.master.device if fused else torch.device("cpu")  # as torch's AdamW has it
            optimizer.state[piece.master] = {
                _STEP: torch.zeros((), dtype=torch.float32, device=counted_on),
                "exp_avg": torch.zeros_like(piece.master),
                "exp_avg_sq": torch.zeros_like(piece.master),
            }
        return optimizer

    def _make_muon(self) -> BatchedMuon:
        config = self.config
        optimizer = BatchedMuon(
            [{"params": [piece.master for piece in self._by_muon]}],
            lr=0.0,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            nesterov=config.nesterov,
            ns_steps=config.ns_steps,
            adjust_lr_fn=config.muon_lr,
        )
        for piece in self._by_muon:
            optimizer.state[piece.master] = {"momentum_buffer": torch.zeros_like(piece.master)}
        return optimizer

    # -- a step ------------------------------------------------------------------------------------------------------

    def clip(self, max_norm: float, norm: Tensor | None = None) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most `max_norm`.

        Every rank calls it. A parameter that several ranks or stages hold counts once. `norm` is the norm if it is
        known, as `pipe.report.norm` is after `pipe.step(..., norm=True)`.

        Returns:
            The norm before, the same on every rank: that of `torch.nn.utils.clip_grad_norm_` in one process.

        """
        if not max_norm > 0:
            raise ValueError(f"max_norm is more than 0, math.inf to clip nothing, got {max_norm}")
        norm = norm if norm is not None else self._pipe.norm_of_gradients()
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch has it
        self._pipe.scale_gradients(factor)
        return norm

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update this rank's part of the parameters. Every rank calls it, after a `pipe.step` that reduced.

        The next `pipe.step` gathers the others' parts, each bucket before its first forward; whoever reads parameters
        before calls `pipe.gather_parameters()`. What was written to parameters since the last update is kept.
        """
        if not self._pipe.has_whole_gradients:
            raise ValueError(
                "step() updates by the whole gradient, and the last pipe.step left each rank its share (no_sync()); "
                "update after a step that reduces"
            )
        for view in self._holdings.views:
            if view.tensor.grad is not None:
                raise ValueError(
                    f"{view.name} has a .grad, which this optimizer does not read: it updates by the shards that "
                    "pipe.step reduced; add what else is to count to the loss, and call zero_grad()"
                )
        for optimizer in (self._adamw, self._muon):
            for group in optimizer.param_groups:
                group["lr"] = lr
        for piece in self.pieces():
            piece.take_gradient()
        self._adamw.step()
        self._muon.step()
        for piece in self.pieces():
            piece.round()
        self._pipe.parameters_updated()
        self._copy_ties()

    def zero_grad(self) -> None:
        """Forget the gradients of this rank's parameters."""
        self._pipe.clear_gradients()

    def not_finite(self) -> list[str]:
        """Return the names of tensors whose gradients have NaN or infinity in this rank's shards."""
        found = [(piece.view.name, piece.gradient) for piece in self.pieces()]
        return list(dict.fromkeys(name for name, grad in found if grad is not None and not grad.isfinite().all()))

    def pieces(self) -> Iterator[OwnedPiece]:
        """Yield what this rank updates."""
        yield from self._by_adamw
        yield from self._by_muon

    def _copy_ties(self) -> None:
        """Keep the objects of a tied parameter on this rank equal."""
        for param, copy in self._holdings.copies:
            copy.detach().copy_(param.detach())

    # -- its state ---------------------------------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """The memory of this rank's moments and masters."""
        moments = (tensor for _, kind, tensor in self._state() if kind != _STEP)
        return sum(tensor.numel() * tensor.itemsize for tensor in moments)

    def _state(self) -> Iterator[tuple[OwnedPiece, str, Tensor]]:
        """Yield (piece, name, tensor) of masters and of what torch's optimizers remember."""
        for optimizer, pieces in ((self._adamw, self._by_adamw), (self._muon, self._by_muon)):
            for piece in pieces:
                if piece.has_master:
                    yield piece, "master", piece.master
                for name, tensor in optimizer.state[piece.master].items():
                    yield piece, name, tensor

    @torch.no_grad()
    def state_dict(self) -> State:
        """Return parameters, buffers and the optimizer's state, the live tensors, by names that no layout changes.

        A parameter is whole, under its own name. `optim.exp_avg.NAME` and its like are runs of elements of the
        flattened tensor NAME; `optim.step.NAME` is the number of updates that it has had. Every rank calls it:
        parameters are gathered if the last update has left them in parts.
        """
        self._pipe.gather_parameters()
        for piece in self.pieces():
            piece.follow()
        state = {view.name: TensorPart.whole(view.of(view.tensor)) for view in self._holdings.views}
        for piece, kind, tensor in self._state():
            name, size = f"{PREFIX}{kind}.{piece.view.name}", piece.view.of(piece.view.tensor).numel()
            whole = kind == _STEP
            state[name] = TensorPart.whole(tensor) if whole else TensorPart.run(tensor.view(-1), piece.run.first, size)
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the values of a state dict of this layout; a Checkpointer has read another layout's into it.

        Raises:
            ValueError: It has other names than `state_dict()`.

        """
        mine = self.state_dict()
        if mine.keys() != state_dict.keys():
            odd = sorted(mine.keys() ^ state_dict.keys())
            raise ValueError(
                f"the state dict is not one of this rank's: {len(odd)} names are in one only, such as {odd[0]}; give "
                "what state_dict() returns, filled by Checkpointer.load"
            )
        for name, part in mine.items():
            given: TensorPart = state_dict[name]
            if given.tensor.data_ptr() != part.tensor.data_ptr():
                part.tensor.copy_(given.tensor)
        self._copy_ties()
