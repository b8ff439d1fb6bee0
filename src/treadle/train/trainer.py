"""The trainer: makes everything that a configuration names, and runs its steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from treadle.api.load_save import save_trace
from treadle.costs import dump, parse
from treadle.dist.mesh_position import MeshPosition
from treadle.models.balancing import update_bias
from treadle.models.build_stages import build_stages
from treadle.models.ends import loss_fn
from treadle.models.load_checkpoint import load_pretrained
from treadle.models.saving import save_pretrained
from treadle.models.tensor_names import tied_parameters, views_of_stages
from treadle.moe.exchanges import make_exchange
from treadle.runtime import Pipeline
from treadle.runtime.model.losses import AUX_LOSS, MAIN
from treadle.runtime.model.seeding import step_seed
from treadle.runtime.world_agreement import agree_over_world
from treadle.train.checking import check_config, learning_rate, note_on_decay
from treadle.train.checkpoint import Checkpointer
from treadle.train.data import Batch, evaluation_batches, open_tokens, training_loader
from treadle.train.data.tokenizing import make_tokenizer
from treadle.train.export import copy_tokenizer
from treadle.train.facts import CORPUS, DEVICE, TOKENS, WEIGHTS, changed, digest_of_weights, settings_of
from treadle.train.fitted_costs import fit_step, write_costs
from treadle.train.nonfinite import NonFiniteError, describe, examine
from treadle.train.optim import ShardedOptimizer
from treadle.train.parallel import ParallelPlan
from treadle.train.probe import ForwardProbe
from treadle.train.run_config import TrainConfig
from treadle.train.run_log import RunLog, StepFacts, overlap_of, peak_bytes, say
from treadle.train.stopping import StopSignal
from treadle.train.world import join_world


@dataclass(frozen=True)
class RunResult:
    """How a run ended: after `step` steps, with the loss of the last; `stopped` if SIGTERM asked it to."""

    step: int
    loss: float
    stopped: bool = False


class Trainer:
    """A rank's part of a run. Every rank makes one with the same configuration and calls `run`.

    Args:
        config: The run. Where its checkpoint directory has a complete checkpoint, the run goes on from there, on
            whatever parallel layout it was saved.

    Raises:
        ValueError: The configuration does not fit the number of ranks, the text or the checkpoint.

    Example:
        trainer = Trainer(TrainConfig(output="runs/first"))
        result = trainer.run()
        trainer.close()

    """

    def __init__(self, config: TrainConfig) -> None:
        check_config(config)
        self.config, self.output = config, Path(config.output)
        self.world = join_world(config)
        self._make_plan()
        self._make_data()
        self._make_pipeline()
        self._lr = learning_rate(config)
        self.optimizer = ShardedOptimizer(self.pipe, self.views, config.optimizer)
        self._make_checkpoints()
        self.log = RunLog(
            self.output,
            self.world.rank,
            steps=config.training.steps,
            tensorboard=config.logging.tensorboard,
            on_gpu=self.world.device.type == "cuda",
            restart=self.world.restart,
        )
        note = note_on_decay(config)
        if note is not None:
            self.log.say(note)
        self.step = 0
        """Steps done."""
        self._loss = math.nan
        self._counted_s = perf_counter()
        self._is_asked_to_stop = False
        self._steps_here = 0
        self._batches: Iterator[Batch] | None = None
        try:
            self._resume()
        except ValueError:
            self.checkpoints.release()
            raise

    # -- making it ---------------------------------------------------------------------------------------------------

    def _make_plan(self) -> None:
        """Decide how the run falls on the ranks, once all are known to have the same settings."""
        settings, weights = {**settings_of(self.config), DEVICE: self.world.device.type}, self.config.checkpoint.weights
        if weights:
            settings[WEIGHTS] = digest_of_weights(weights)
        self._agree_on(settings)
        self.plan = ParallelPlan.of(self.config, self.world.size)

    def _make_data(self) -> None:
        """Open the text, which is the same on all ranks, where each has what its exchange needs."""
        problem: ValueError | None = None
        self._corpus = self._tokens = ""
        try:
            make_exchange(self.config.parallel.exchange, self.config.model.num_experts)
            self._open_text()
        except ValueError as error:
            problem = error
        except OSError as error:  # a full disk, a directory of another user
            problem = ValueError(f"data.cache cannot be written: {error}; free space, or choose another directory")
        self._agree_on({CORPUS: self._corpus, TOKENS: self._tokens}, problem)

    def _agree_on(self, facts: dict[str, str], problem: ValueError | None = None) -> None:
        """Refuse ranks with different facts, and a rank with a problem, on all of them."""
        agree_over_world(self.world.rank, self.world.size, self.config.parallel.deadline_s, facts, problem)

    def _open_text(self) -> None:
        data, training = self.config.data, self.config.training
        tokenizer = make_tokenizer(data.tokenizer, data.end_of_document)
        if tokenizer.vocab_size > self.config.model.vocab_size:
            raise ValueError(
                f"the tokenizer {data.tokenizer!r} has {tokenizer.vocab_size} tokens, more than model.vocab_size "
                f"{self.config.model.vocab_size}; set that to {tokenizer.vocab_size} or more"
            )
        cache = Path(data.cache) if data.cache else self.output / "data"
        store = open_tokens(data.paths, tokenizer, cache, field=data.field, held_out=data.held_out)
        self._corpus, self._tokens = store.key, store.digest
        self._training, self._held_out = store.training(training.seq_len), store.held_out(training.seq_len)
        if len(self._training) and not self._training.num_targets_of_first(len(self._training)):
            raise ValueError(f"data.paths {list(data.paths)} have only empty documents: there is no token to predict")
        evaluated = training.eval_batches * training.global_batch_size or len(self._held_out)
        if training.eval_every and not self._held_out.num_targets_of_first(evaluated):
            raise ValueError(
                f"data.held_out = {data.held_out} holds out less than a sample of text; raise it, or set "
                "training.eval_every to 0"
            )

    def _make_pipeline(self) -> None:
        config, plan, device = self.config, self.plan, self.world.device
        place = MeshPosition.of(self.world.rank, plan.pp, plan.dp, plan.ep)
        numbers = plan.stages_of(place.pp_rank)
        self.stages = build_stages(
            config.model,
            plan.rows,
            numbers,
            ep=plan.ep,
            ep_rank=place.ep_rank,
            exchange=config.parallel.exchange,
            device=device,
            dtype=getattr(torch, config.training.dtype),
            seed=config.training.seed,
        )
        if config.checkpoint.weights:
            load_pretrained(self.stages, config.checkpoint.weights)
        self.views = views_of_stages(self.stages)
        self._probe = ForwardProbe(self.stages, numbers, self.world.rank)
        self.pipe = Pipeline(
            self.stages,
            plan.schedule,
            mesh=place,
            loss_fn=loss_fn,
            tied=tied_parameters(config.model, plan.rows),
            seed=config.training.seed,
            deadline_s=config.parallel.deadline_s,
            recompute=config.parallel.recompute,
            saved=config.parallel.saved,
            lanes=config.parallel.lanes,
        )
        self._replica = {"replica": self.pipe.position.dp_rank, "num_replicas": plan.num_replicas}
        self.loader = training_loader(
            self._training, batch_size=config.training.global_batch_size, seed=config.training.seed, **self._replica
        )

    def _make_checkpoints(self) -> None:
        config = self.config.checkpoint
        directory = Path(config.directory) if config.directory else self.output / "checkpoints"
        self.checkpoints = Checkpointer(directory, pipe=self.pipe, keep=config.keep, every=config.every, say=say)

    def _resume(self) -> None:
        """Go on from the latest complete checkpoint."""
        found = self.checkpoints.latest() if self.config.checkpoint.resume else None
        self.log.say(self._describe(found))
        if found is None:
            return
        extra = self.checkpoints.load(found, self.optimizer)
        _check_same_model(self.config.model.to_hf(), extra["model"])
        told = changed(self._settings(), extra.get("settings", {}))
        if told is not None:
            self.log.say(told)
        self.loader.load_state_dict(extra["data"])
        self.step, self._loss = found, extra["loss"]
        self.pipe.resume_at(found)

    def _describe(self, found: int | None) -> str:
        plan, training = self.plan, self.config.training
        tokens = training.global_batch_size * training.seq_len
        start = f"resumed at step {found}" if found is not None else "from the start"
        restart = f" (restart {self.world.restart})" if self.world.restart else ""
        return (
            f"{'|'.join(plan.rows)}  pp {plan.pp} x dp {plan.dp} x ep {plan.ep}  {self.config.parallel.schedule}  "
            f"{plan.num_microbatches} micro-batches, {tokens:,} tokens a step  {start}{restart}"
        )

    # -- running it --------------------------------------------------------------------------------------------------

    def run(self, *, after_step: Callable[[StepFacts], None] | None = None) -> RunResult:
        """Run all steps that are left, or until SIGTERM; every rank returns the same.

        A checkpoint that cannot be saved is reported, and the run goes on.

        Args:
            after_step: is called on every rank with what the step reported, once the step is evaluated and
                saved where that is due. The next step begins when it returns. If it reads parameters, it calls
                `trainer.pipe.gather_parameters()` first, on every rank.

        Raises:
            SaveError: The checkpoint of the last step could not be saved.

        """
        training, stopped = self.config.training, False
        if self.step >= training.steps:
            self.log.say(f"all {training.steps} steps are done; a larger training.steps goes on")
        self._since_last()
        with StopSignal() as stop:
            while self.step < training.steps and not stopped:
                facts = self.train_step(stop, again=after_step is None and not self._evaluates_at(self.step + 1))
                stopped = self._is_asked_to_stop
                self._log_step(facts)
                if self._evaluates_at(self.step):
                    self.evaluate()
                if self.checkpoints.due(self.step) or stopped or self.step == training.steps:
                    self.save()
                if after_step is not None:
                    after_step(facts)
            if self.config.checkpoint.export and self.step == training.steps:
                self.pipe.gather_parameters()
                self._export(self.output / "model")
            self.checkpoints.wait()
        if stopped and self.step < training.steps:
            self.log.say(f"stopped by SIGTERM, saved at step {self.step}; the same command goes on from there")
        return RunResult(self.step, self._loss, stopped)

    def _export(self, directory: Path) -> None:
        save_pretrained(self.stages, self.config.model, directory)
        if self.world.rank == 0:
            copy_tokenizer(self.config.data.tokenizer, self.config.checkpoint.weights, directory)

    def _evaluates_at(self, step: int) -> bool:
        training = self.config.training
        return _due(step, training.eval_every) or (training.eval_every > 0 and step == training.steps)

    def train_step(self, stop: StopSignal | None = None, *, again: bool = False) -> StepFacts:
        """Run the next step: forward, backward, clipping, update. Ranks agree once, after the last backward.

        `again`: no evaluation comes before the step after this one, on any rank; they then need not compare the call.
        """
        lr = self._lr(self.step)
        torch.manual_seed(step_seed(self.config.training.seed, self.step))
        batch = self._next_batch()
        self.pipe.step(
            batch.inputs,
            batch.targets,
            side=batch.side(self.plan.schedule.num_microbatches),
            num_tokens=batch.num_tokens,
            norm=True,
            again=again,
            tell=lambda: (float(stop is not None and stop.came), float(peak_bytes(self.world.device))),
        )
        report = self.pipe.report
        assert report is not None
        asked, peak = report.largest
        self._is_asked_to_stop = asked > 0
        if not report.finite:
            self._stop_not_finite(batch, float(report.loss))
        norm = float(self.optimizer.clip(self.config.training.clip_norm or math.inf, report.norm))
        self.optimizer.step(lr)
        self.optimizer.zero_grad()
        self._balance_experts()
        self.step += 1
        self._steps_here += 1
        bubble, hidden = self._measure()
        if self._steps_here == self.config.parallel.plan_again_at:
            self._plan_again()
        self._loss = float(report.by_name.get(MAIN, report.loss))
        aux = float(report.by_name[AUX_LOSS]) if AUX_LOSS in report.by_name else None
        tokens = self.config.training.global_batch_size * self.config.training.seq_len
        return StepFacts(self.step, self._loss, aux, tokens / self._since_last(), bubble, hidden, int(peak), norm, lr)

    def _since_last(self) -> float:
        """Return the seconds since it was called last: evaluations, saves, traces and the loader count too."""
        before, self._counted_s = self._counted_s, perf_counter()
        return self._counted_s - before

    def evaluate(self) -> float:
        """Return the mean loss of a token of held-out text, the same on every rank; the model is left as it is."""
        training, total, num_tokens = self.config.training, 0.0, 0
        batches = evaluation_batches(
            self._held_out, batch_size=training.global_batch_size, most=training.eval_batches, **self._replica
        )
        for batch in batches:
            total += self._forward(batch) * batch.num_tokens if batch.num_tokens else 0.0
            num_tokens += batch.num_tokens
        self.log.evaluation(self.step, total / num_tokens, num_tokens)
        return total / num_tokens

    def save(self) -> None:
        """Save a checkpoint of now, in the background."""
        model, settings = self.config.model.to_hf(), self._settings()
        extra = {"data": self.loader.state_dict(), "model": model, "settings": settings, "loss": self._loss}
        self.checkpoints.save(self.step, self.optimizer, extra)

    def close(self) -> None:
        """Give back files, communicators and the process group."""
        self.log.close()
        self.checkpoints.close()
        self.pipe.close()
        self.world.leave()

    def _settings(self) -> dict[str, str]:
        """Return what a checkpoint remembers of the run."""
        return {**settings_of(self.config), CORPUS: self._corpus}

    # -- parts of it -------------------------------------------------------------------------------------------------

    def _next_batch(self) -> Batch:
        """Return the next batch that has a token to predict; all replicas skip the same ones."""
        if self._batches is None:
            self._batches = iter(self.loader)
        while not (batch := next(self._batches)).num_tokens:
            self.log.say(f"step {self.step + 1}: a batch of documents without tokens is skipped")
        return self._on_device(batch)

    def _on_device(self, batch: Batch) -> Batch:
        device = self.world.device
        moved = {name: getattr(batch, name).to(device) for name in ("inputs", "targets", "positions")}
        return replace(batch, **moved)

    def _forward(self, batch: Batch) -> float:
        """Return the mean loss of a token of a batch, without auxiliary losses."""
        batch = self._on_device(batch)
        loss = self.pipe.evaluate(
            batch.inputs,
            batch.targets,
            side=batch.side(self.plan.schedule.num_microbatches),
            num_tokens=batch.num_tokens,
        )
        assert self.pipe.report is not None
        return float(self.pipe.report.by_name.get(MAIN, loss))

    def _stop_not_finite(self, batch: Batch, loss: float) -> None:
        found = examine(
            self.world.rank, self.views, self.optimizer.not_finite(), self._probe, lambda: self._forward(batch)
        )
        raise NonFiniteError(describe(self.step + 1, loss, found))

    def _balance_experts(self) -> None:
        """Move the biases of sigmoid routers against the load of the step."""
        rate = self.config.model.bias_update_rate
        if rate:
            with self.pipe.together("the exchange of parameters"):
                update_bias(self.stages, rate, self.pipe.reduce_group)

    def _measure(self) -> tuple[float | None, float | None]:
        """Return bubble and hidden communication of rank 0's pipeline, where it is due; write the trace where due."""
        logging = self.config.logging
        measures, traces = _due(self.step, logging.measure_every), _due(self.step, logging.trace_every)
        if not measures and not traces:
            return None, None
        trace = self.pipe.gather_trace() if measures else None  # every rank has to ask
        whole = self.pipe.gather_mesh_trace() if traces else None
        if whole is not None:
            directory = self.output / "traces"
            with self.log.unless_full(f"the trace of step {self.step}"):
                directory.mkdir(exist_ok=True)
                save_trace(whole, directory / f"step{self.step}.json.gz")
                write_costs(whole, self.output)
        return overlap_of(trace) if trace is not None and self.world.rank == 0 else (None, None)

    def _plan_again(self) -> None:
        """Order ops by what they took in the step before, in the first pipeline, for all pipelines alike."""
        trace = self.pipe.gather_trace()
        told = dump(fit_step(trace)) if self.world.rank == 0 else None
        (costs,) = {text for of_replicas in self.pipe.agree(told=told) for text in of_replicas if text is not None}
        self.pipe.plan_again(parse(costs))

    def _log_step(self, facts: StepFacts) -> None:
        printed = _due(self.step, self.config.logging.every) or self.step == self.config.training.steps
        self.log.step(facts, printed=printed)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _check_same_model(wanted: dict[str, Any], saved: dict[str, Any]) -> None:
    """Refuse a checkpoint of another model."""
    wanted = json.loads(json.dumps(wanted))
    odd = [name for name in sorted({*wanted, *saved}) if wanted.get(name) != saved.get(name)]
    if odd:
        name = odd[0]
        raise ValueError(
            f"the checkpoint is of a model with {name} {saved.get(name)!r}, got {wanted.get(name)!r}; choose another "
            "--output, or --checkpoint.no-resume"
        )
