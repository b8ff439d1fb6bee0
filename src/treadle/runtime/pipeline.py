"""A schedule on real processes: `Pipeline` makes a rank's part of it and runs steps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from treadle.costs import Costs
from treadle.dist.backends import is_dry
from treadle.dist.calls import number_of
from treadle.dist.clock import clock_offset
from treadle.dist.gathering import gather_json
from treadle.dist.groups import Group
from treadle.dist.mesh_position import MeshPosition
from treadle.dist.streams import HOST_MEMORY, Download, upload
from treadle.ir import Schedule
from treadle.ir.trace import Trace
from treadle.passes.mesh import spread
from treadle.runtime.agreement import Claim, exchange
from treadle.runtime.executors import RankExecutors
from treadle.runtime.feed import feed
from treadle.runtime.held_parameters import HeldParameter, parameters_held
from treadle.runtime.model.chunk import Chunk, LossFn
from treadle.runtime.model.input_shapes import InputShapes
from treadle.runtime.model.parameter_bucket import DividedBuckets, exchange_all
from treadle.runtime.model.parameters import Parameters
from treadle.runtime.model.saved import SavedReport
from treadle.runtime.model.seeding import drawing, generator_of, step_seed
from treadle.runtime.model.side import Side
from treadle.runtime.model.tied import Tie
from treadle.runtime.norm import counted_here, norm_over, share_of_norm
from treadle.runtime.pipeline_options import RunOptions, RunOptionsChanges
from treadle.runtime.rank_part import RankPart, make_rank_part
from treadle.runtime.run.executor import Executor
from treadle.runtime.run.step_trace import merge
from treadle.runtime.shapes import MIXED, agree_on_shapes, exchanges_blindly
from treadle.runtime.stale_parameters import StaleParameters, refuse_stale
from treadle.runtime.step_report import NUM_TOLD, OwnShare, StepReport, report_of
from treadle.runtime.ties import Tied

DEFAULTS = RunOptions()
SECOND_OPTIMIZER = (
    "an optimizer of shards has this Pipeline's gradients, and a second one would leave it an old gradient; go on with "
    "the first, or close() this Pipeline and make a new one for the second"
)


class Pipeline:
    """A rank's part of a pipeline that runs `schedule`.

    Args:
        stages: For each of this rank's chunks its module.
        schedule: The same on all ranks.
        mesh: A DeviceMesh with the dimension pp, and perhaps dp and ep; or a `MeshPosition.of(rank, pp, dp, ep)`, which
            makes no process groups: `init_device_mesh` makes one for every row of every dimension.
        loss_fn: `loss_fn(output, target)` returns one number for a micro-batch, on ranks that hold the last stage.
        tied: Parameters that stages share: `{"embedding": {0: "table.weight", -1: "linear.weight"}}` names one by its
            name in the module of each stage that has it; -1 is the last stage. They start from the same values, and
            all get the sum of their gradients. A parameter that chunks of one rank share as an object needs no name.
        options: How it runs.
        changes: Fields of `RunOptions` by name: `Pipeline(..., lanes="serial")` replaces that field of `options`.

    Raises:
        TypeError: An argument is of another type.
        ValueError: On all ranks, if the modules of one do not fit the schedule or each other.

    Example:
        A pipeline of one rank; under torchrun, `dist.init_process_group("gloo")` and a mesh of more ranks.

        >>> import torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        >>> schedule = treadle.generate("1f1b", pp=1, microbatches=2)
        >>> pipe = Pipeline({0: nn.Linear(4, 4)}, schedule, mesh=mesh, loss_fn=nn.functional.mse_loss)
        >>> loss = pipe.step(torch.randn(4, 4), torch.randn(4, 4))
        >>> pipe.report.finite, pipe.report.reduced
        (True, True)
        >>> pipe.close()
        >>> dist.destroy_process_group()

    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        *,
        mesh: DeviceMesh | MeshPosition,
        loss_fn: LossFn,
        tied: Tied | None = None,
        options: RunOptions = DEFAULTS,
        **changes: Unpack[RunOptionsChanges],
    ) -> None:
        part = self.instrument(make_rank_part(stages, schedule, mesh, loss_fn, tied, options, changes))
        self._part, self._guard, self._waits = part, part.joined.guard, part.joined.waits
        self.position, self.options, self.device = part.joined.position, part.joined.options, part.joined.device
        self.groups, self.gradients, self.stages = part.agreed.groups, part.gradients, part.stages
        self.schedule, self.program = part.agreed.plan.schedule, part.agreed.plan.step.program
        self._modules, self._parameters = part.joined.modules, Parameters(part.joined.modules)
        self._executors = RankExecutors(part)
        self._step = 0
        self._last: Executor | None = None
        self._closed = False
        self._is_spent = False  # gradients that a ShardedOptimizer has updated by, and nobody has cleared
        self._syncs, self._promised = True, False
        self._divided: DividedBuckets | None = None
        self._stale, self._exchanges_ties = StaleParameters(self._parameters), False
        self.report: StepReport | None = None

    def instrument(self, part: RankPart) -> RankPart:
        """Return the part that runs; a subclass may put handlers and channels of its own into it, to measure them."""
        return part

    # -- running it --------------------------------------------------------------------------------------------------

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        side: Side | None = None,
        num_tokens: float | None = None,
        norm: bool = False,
        tell: Callable[[], Sequence[float]] | None = None,
        again: bool = False,
    ) -> Tensor:
        """One step over all micro-batches; the loss of the global batch, on every rank. Gradients are in `.grad`.

        `inputs` are needed where the first stage is, `targets` where the last is or MTP blocks are: a tensor that is
        cut into micro-batches, or a list of them. What they are on other ranks does not matter. `loss_fn` gets None
        where there are no targets. `side` are values that stages read beside what passes through the pipeline, by name
        (positions, document ids), cut as inputs are; every rank whose stages read one gives it.

        The gradient is that of sum(losses) / num_tokens over all micro-batches of all replicas; without `num_tokens`,
        of their mean. Auxiliary losses are always averaged over micro-batches and replicas. A second step adds to
        `.grad`. In `no_sync()` it stays this rank's share, for a later step to reduce. `report` says more: with `norm`
        also the 2-norm of the whole gradient, and of each of the two numbers at most that `tell()` returns after the
        last op, the largest of any rank. They travel with the loss. `again` promises that a step is what this rank
        calls next of `step` and `evaluate`: where all ranks do, they need not compare that call.

        A step that raises leaves `.grad` and the random state as they were, on every rank; only buffers keep what
        forwards wrote. Where all ranks raise the same, and where there is one rank, the next step goes on as if there
        had been none. Else ranks are lost to each other: each `step` raises RankLostError, and what is left is to
        `close()` the Pipeline and make a new one.
        """
        self._refuse_closed()
        reduce = self._syncs
        self.gradients.refuse_mixture(reduce=reduce)
        self._refuse_spent()
        executors, store = self._executors, self._part.recipe.store
        reduces, gathers = reduce or not self.gradients.reduces, bool(self._stale)
        chosen = executors.step(reduces=reduces, gathers=gathers)
        scale = self._scale(num_tokens)
        with self._all_or_nothing(), self._guard.step(self._step, own_first=True):
            self._begin(chosen, self.stages, scale)
            self._check_training()
            self._feed(self.stages, inputs, targets, side or {})
            self._guard.raise_known()
            if not self._promised:
                self._announce("step()" + " in no_sync()" * (not reduces) + " after an update" * gathers)
            self._promised = False
            self._agree_on_shapes(self.stages, executors.input_shapes)
            self.gradients.begin()  # behind all refusals, which leave `.grad` alone
            if store is not None:
                store.begin([mb.given() for stage in self.stages.values() for mb in stage.microbatches()])
            self._run(chosen, self.stages)
            self.gradients.finish(reduce=reduce)
            saved = store.report() if store is not None else None
            share = self._own_share(tell, norm=norm and reduce, again=again)
            report, promised = self._finish(self.stages, scale, self.gradients.num_bad(), saved, share)
            self.gradients.keep()
        self.report, self._last, self._promised = report, chosen, promised
        self._stale.gathered()  # a step that failed gathers once more
        self._step += 1
        return report.loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let steps leave each rank its share of the gradient; the next step outside reduces it with its own.

        All ranks step inside alike.

        Example: `with pipe.no_sync(): pipe.step(x, y)`, then `pipe.step(x2, y2)`.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def evaluate(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        side: Side | None = None,
        num_tokens: float | None = None,
    ) -> Tensor:
        """Runs all micro-batches forward; returns the loss of the global batch, the same on every rank.

        Takes what `step` takes, in micro-batches of any size, one for all of them where the option `shapes` is same.
        Leaves `.grad`, the random state, the next step's randomness, and the modules' train or eval mode as they are;
        auxiliary losses count as in `step`. `report` has the loss of each micro-batch.
        """
        self._refuse_closed()
        refuse_stale(self._parameters.parts(), self._stale)
        self.gather_parameters()
        chosen, stages = self._executors.evaluation, self._executors.evaluated_stages
        scale = self._scale(num_tokens)
        with self._all_or_nothing(), self._guard.step(self._step, own_first=True), torch.no_grad():
            self._begin(chosen, stages, scale)
            self._executors.forget_evaluated()
            self._feed(stages, inputs, targets, side or {})
            self._guard.raise_known()
            with self._guard.together("the agreement on the call"):
                self._announce("evaluate()", at_once=True)
            self._guard.resume()
            self._agree_on_shapes(stages, InputShapes())
            self._run(chosen, stages)
            self.report, self._promised = self._finish(stages, scale, 0, None, OwnShare())
        self._begin(chosen, stages, scale)  # forgets what was on its way
        return self.report.loss

    def resume_at(self, step: int) -> None:
        """Number the next step, counted from 0, as a run that is resumed does: its randomness is that of this number.

        Example: `pipe.resume_at(100)` behind a checkpoint of 100 steps.
        """
        if step < 0:
            raise ValueError(f"steps are counted from 0, got {step}")
        self._step = step

    def _announce(self, call: str, *, at_once: bool = False) -> None:
        """Compares the call that ranks are in, before their messages meet: with the first of those, or at once."""
        control = [group for group in (self.groups.pp_group, self.groups.replica_group) if group is not None]
        for group in control if not is_dry() else ():
            group.announce(number_of(call, self._step, self.position.rank))
        for group in control if at_once else ():
            group.settle()

    def _begin(self, chosen: Executor, stages: dict[int, Chunk], scale: float) -> None:
        """Before a step or an evaluation: nothing is left of the one before."""
        self._guard.program = chosen.program
        factors = upload([scale, self._scale(None)], torch.float64, self.device)
        for stage in stages.values():
            stage.begin_step(factors[0], factors[1])

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Wraps a step or an evaluation: if it raises, nothing is left of it."""
        generator = generator_of(self.device)
        state = generator.get_state()
        try:
            yield
        except BaseException:
            self.gradients.give_back()
            generator.set_state(state)
            if not self._guard.is_lost:  # else no other step can follow
                self._forget()
            raise

    def _forget(self) -> None:
        """Forget what a step that failed has begun and learned: the next one is as the first."""
        self._executors.close()
        self._executors, self._last = RankExecutors(self._part), None

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ValueError("this Pipeline is closed: its communicators are given back; make a new one")

    def _scale(self, num_tokens: float | None) -> float:
        if num_tokens is None:
            return 1.0 / (self.schedule.num_microbatches * self.position.dp)
        if not 0 < num_tokens < math.inf:
            raise ValueError(
                f"num_tokens is what the sum of the losses is divided by, more than 0 and finite, got {num_tokens}"
            )
        return 1.0 / float(num_tokens)

    def _check_training(self) -> None:
        """Refuses what would train nothing, or something else than was planned."""
        if not torch.is_grad_enabled():
            raise ValueError("step() trains, but gradients are off (torch.no_grad()); use evaluate() for losses alone")
        self._parameters.check()
        refuse_stale(self._parameters.parts(), self._stale)

    def _refuse_spent(self) -> None:
        """Refuse to add to gradients that an optimizer has updated by. All ranks refuse alike."""
        if self._is_spent:
            raise ValueError(
                "the gradients of the last update are still there, and this step would add to them; call "
                "optimizer.zero_grad() of the ShardedOptimizer: module.zero_grad(), p.grad = None and zero_grad() of "
                "torch's optimizers find no .grad to clear"
            )

    def _feed(self, stages: dict[int, Chunk], inputs: Any, targets: Any, side: Side) -> None:
        feed(stages, self.schedule, inputs, targets, side, self._part.agreed.side_names)

    def _agree_on_shapes(self, stages: dict[int, Chunk], shapes: InputShapes) -> None:
        """Lets all ranks of the pipeline know whether headers come in this step, where they may come."""
        if self.options.shapes == "same":
            return
        shapes.take(stages)
        blind = exchanges_blindly(self._modules.values(), self._part.agreed.plan.shape, self.position.ep)
        with self._guard.together("the agreement on shapes"):
            differ, mixed = agree_on_shapes(self.groups, shapes, blind=blind)
        if mixed:
            raise ValueError(MIXED)
        self._guard.resume()
        for stage in stages.values():
            stage.differ = differ or self.options.shapes == "any"

    def _run(self, chosen: Executor, stages: dict[int, Chunk]) -> None:
        """Runs the ops. Where stages are seeded, and in an evaluation, the random state is left as it was."""
        seeds = self.options.seed is not None
        if self.options.seed is not None:
            base = step_seed(self.options.seed, self._step)
            for stage in stages.values():
                assert stage.seeds is not None
                stage.seeds.begin_step(base)
        with drawing(generator_of(self.device), seeds=seeds, restores=seeds or stages is not self.stages):
            chosen.run(self._guard)

    def _own_share(self, tell: Callable[[], Sequence[float]] | None, *, norm: bool, again: bool) -> OwnShare:
        numbers = tuple(tell()) if tell is not None else ()
        if len(numbers) > NUM_TOLD:
            raise ValueError(f"tell() returns {NUM_TOLD} numbers at most, got {len(numbers)}")
        squared = share_of_norm(self._counted_gradients(), 2.0, self.device) if norm else None
        return OwnShare(squared, numbers, again)

    def _finish(
        self, stages: dict[int, Chunk], scale: float, num_bad: int, saved: SavedReport | None, share: OwnShare
    ) -> tuple[StepReport, bool]:
        return report_of(self._part, stages, scale, self._scale(None), num_bad, saved, share)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def counted_parameters(self) -> list[tuple[int, str, nn.Parameter]]:
        """(stage, name, parameter) of those that this rank counts: over all ranks, each of the model once.

        A sum over them, added up over all ranks, is one over the model, however many replicas, copies of a stage and
        stages with a tied parameter there are.
        """
        return list(counted_here(self._modules, self.schedule.placement, self.position, self.gradients))

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients of the model, the same on every rank. Every rank of the mesh has to ask for it.

        It is that of a single process, as `torch.nn.utils.get_total_norm` has it: a parameter that several ranks hold
        counts once. `torch.nn.utils.clip_grads_with_norm_` clips a rank's gradients by it.
        """
        if self.gradients.is_divided:
            raise ValueError(
                "grad_norm() is for torch.nn.utils.clip_grads_with_norm_, which finds no .grad beside a "
                "ShardedOptimizer; optimizer.clip(max_norm) clips and returns the norm, optimizer.clip(math.inf) "
                "returns it alone"
            )
        return self.norm_of_gradients(norm_type)

    def norm_of_gradients(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients of the model, wherever they are. Every rank of the mesh has to ask for it."""
        self._refuse_closed()
        if not self.gradients.reduced:
            raise ValueError(
                "grad_norm() is of the whole gradient, and the last step left each rank its share (no_sync()); ask "
                "after a step that reduces"
            )
        if not norm_type > 0:
            raise ValueError(f"norm_type is more than 0, math.inf for the largest element, got {norm_type}")
        if self.device.type == "meta":
            return torch.zeros((), dtype=torch.float64, device=HOST_MEMORY)  # a dry run has no numbers
        with self._guard.step(self._step):
            grads = self._counted_gradients()
            share = Download(share_of_norm(grads, norm_type, self.device)).tensor(self._waits.await_event)
            with self._guard.together("grad_norm()"):
                self._announce("grad_norm()")
                return norm_over(self.groups, share, norm_type).to(self.device)

    def _counted_gradients(self) -> list[Tensor]:
        """Return gradients, or this rank's shards of them: over all ranks, each of the model once."""
        counted = self.counted_parameters()
        if self.gradients.is_divided:
            return self.gradients.shards()
        return [param.grad for _, _, param in counted if param.grad is not None]

    def clear_gradients(self) -> None:
        """Forget the gradients of this rank's parameters."""
        self.gradients.clear()
        self._is_spent = False

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply this rank's shards of the gradients."""
        for shard in self.gradients.shards():
            shard.mul_(factor.to(shard.dtype))

    @property
    def has_whole_gradients(self) -> bool:
        """False if the last step left each rank its share of the sums (`no_sync`)."""
        return self.gradients.reduced

    # -- parameters that ranks divide ----------------------------------------------------------------------------------

    @property
    def modules(self) -> dict[int, nn.Module]:
        """The modules of this rank, by the number of the stage."""
        return {stage.number: self._modules[chunk] for chunk, stage in self.stages.items()}

    @property
    def ties(self) -> tuple[Tie, ...]:
        """The parameters that stages share, in one order on all ranks."""
        return self.gradients.ties

    @property
    def reduce_group(self) -> Group | None:
        """The ranks with the same stages, which sum the gradients; None where this one is alone."""
        return self.groups.reduce_group

    def held_parameters(self) -> dict[nn.Parameter, HeldParameter]:
        """Return where this rank has each parameter that trains, and which ranks divide it."""
        placement, shape = self.schedule.placement, self._part.agreed.plan.shape
        return dict(parameters_held(self._modules, placement, self.position, self.gradients, shape))

    def agree(self, claims: Sequence[Claim] = (), problem: str | None = None, *, told: Any = None) -> list[list[Any]]:
        """Raise ValueError on all ranks if one has a problem, or ranks claim different facts of one thing.

        All ranks call it.

        Returns:
            For each rank along pp the different values that it and its replicas told, in JSON.

        """
        with self.together("the agreement between steps"):
            agreed = exchange(self.groups, claims, problem, told=told, doing="agree")
        if agreed.refusal is not None:
            raise ValueError(agreed.refusal)
        return agreed.told

    def divide(self, buckets: DividedBuckets) -> None:
        """Reduce gradients into the shards of these buckets, and gather their parameters after an update.

        Both are ops of the Program from then on: REDUCE_SCATTER and GATHER_PARAMS. All ranks call it.
        """
        part, placement, rank = self._part, self.schedule.placement, self.position.pp_rank
        mine = [[placement.stage(rank, chunk), list(firsts)] for chunk, firsts in buckets.firsts.items()]
        problem = SECOND_OPTIMIZER if self._divided is not None else None
        told = [row for of in self.agree(problem=problem, told=[mine, bool(buckets.tied_parameters)]) for row in of]
        firsts = {stage: tuple(of_stage) for rows, _ in told for stage, of_stage in rows}
        plan = part.agreed.plan.by_bucket(tuple(firsts[stage] for stage in range(placement.num_stages)))
        self._exchanges_ties = any(ties for _, ties in told)
        self._divided, self.program = buckets, plan.step.program
        self.gradients.divide(buckets)
        self._part = replace(part, agreed=replace(part.agreed, plan=plan), parameters=buckets.parameters)
        if plan.ends.gather:
            self._stale.watch()
        self._forget()

    def plan_again(self, costs: Costs) -> None:
        """Order the ops of layers by these costs from now on, as measured ones; results keep their bits.

        All ranks call it with the same costs. Where layers do not name their segments, nothing changes.

        Raises:
            ValueError: on all ranks, if their costs differ.

        """
        part = self._part
        self.agree([Claim("the run", {"costs": repr(costs)})])
        plan = part.agreed.plan.by_costs(costs)
        self.program = plan.step.program
        self._part, last = replace(part, agreed=replace(part.agreed, plan=plan)), self._last
        self._forget()
        self._last = last  # its times are there to be gathered

    def parameters_updated(self) -> None:
        """Each rank has updated its part of the parameters: the others get it in the next step. All ranks call it.

        Tied parameters are exchanged at once.
        """
        if self._divided is not None and self._exchanges_ties:
            with self.together("the exchange of parameters"):
                exchange_all(self._divided.tied_parameters)
        self._stale.updated()
        self._is_spent = True

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """Make the parameters whole now, not in the next step, for who reads them between steps. All ranks call it.

        Does nothing where they are whole. `evaluate`, checkpoints and `close` call it.
        """
        if self._stale:
            self._refuse_closed()
            with self.together("the exchange of parameters"):
                for buckets in self._part.parameters.values():
                    exchange_all(buckets)
            self._stale.gathered()

    def _gather_for_good(self) -> None:
        """Leave whole parameters, where the other ranks are there to give them."""
        if self._stale and not self._guard.is_lost:
            try:
                self.gather_parameters()
            except Exception as error:
                warnings.warn(f"parameters of this rank lack the last update of other ranks: {error}", stacklevel=3)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Watches over what all ranks do together between steps: one that is lost meanwhile is named on all others.

        `what` is "the exchange of parameters" of an optimizer, or "the agreement between steps".
        """
        self._refuse_closed()
        with self._guard.step(self._step), self._guard.together(what):
            self._announce(what, at_once=True)
            yield

    def gather_over_replicas(self, row: list[Any]) -> tuple[list[list[Any]], int]:
        """Return the rows of all replicas of this rank's stages, in one order for all, and this rank's place.

        Rows go as JSON. Every rank of the mesh calls it.
        """
        group = self.groups.replica_group
        if group is None:
            return [row], 0
        with self.together("the agreement between steps"):
            return gather_json(group, row), group.group_rank

    # -- what happened -----------------------------------------------------------------------------------------------

    def gather_trace(self) -> Trace:
        """Return the times of the last step's ops in this rank's pipeline, its ranks on one clock.

        Every rank of the mesh calls it.
        """
        with self._gathering():
            times = self._times_of_pipeline()
        assert self._last is not None
        start, end = times.numpy()
        return merge(self._last.program, start, end, about=self._about_trace)

    def gather_mesh_trace(self) -> Trace | None:
        """Return the times of the last step's ops in all pipelines on the first rank of the mesh, None on the others.

        Every rank of the mesh calls it. The trace takes about 70 bytes for each op of each GPU.
        """
        position, first = self.position, self.position.ranks[0][0]
        with self._gathering():
            times = self._times_of_pipeline()
            replicas = [times]
            if position.pp_rank == 0 and self.groups.replica_group is not None:
                ranks = self.groups.replica_group.ranks
                if position.rank != first:
                    self.groups.replica_group.send(times, ranks.index(first))
                else:
                    replicas += [torch.empty_like(times) for _ in position.dp_ranks[1:]]
                    for rank, room in zip(position.dp_ranks[1:], replicas[1:], strict=True):
                        self.groups.replica_group.recv(room, ranks.index(rank))
        if position.rank != first:
            return None
        assert self._last is not None
        program = spread(self._last.program, ep=position.ep, dp=position.dp // position.ep)
        start, end = torch.cat(replicas, dim=1).numpy()
        return merge(program, start, end, about=self._about_trace)

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Wraps what all ranks do to have a trace of the last step."""
        self._refuse_closed()
        if self._last is None:
            raise ValueError("there is no step yet to have a trace of")
        with self._guard.step(self._step), self._guard.together("gather_trace()"):
            self._announce("gather_trace()")
            yield

    def _times_of_pipeline(self) -> Tensor:
        """Return [start or end, op] of the last step's ops in this rank's pipeline."""
        assert self._last is not None
        times = torch.from_numpy(self._last.times())
        times = torch.where(times >= 0, times + self._clock_offset, 0)
        self.groups.pp_group.all_reduce(times)
        return times

    @property
    def _about_trace(self) -> str:
        return f"measured, step {self._step - 1}, {self.device.type}"

    @cached_property
    def _clock_offset(self) -> int:
        along_pp = clock_offset(self.groups.pp_group)
        if self.groups.replica_group is None:
            return along_pp
        along_dp = torch.tensor([clock_offset(self.groups.replica_group)], device=HOST_MEMORY)
        return along_pp + int(self.groups.pp_group.all_gather(along_dp)[0])

    def close(self) -> None:
        """Gives the modules back as they were, says goodbye, and gives back communicators, threads and memory at once.

        May be called again. Ranks close when none of them needs another any more.
        """
        if self._closed:
            return
        self._gather_for_good()
        self._closed = True
        self._guard.close()
        if self._guard.is_lost:
            self.groups.break_off()  # or a thread that still waits for a lost rank would be waited for
        self._executors.close()
        self._stale.close()
        self._part.given_back.close()
        self.groups.close()
