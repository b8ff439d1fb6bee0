"""Steps under injected delays, against one process and against serial lanes.

    python -m tests.support.fuzz --draws 2000

A draw is one step of a pipeline on real processes, its threads and ranks paused at places drawn from the draw's seed
(`delays.py`). Its loss and every gradient must be those of the model in one process within a tolerance, and those of
the same pipeline on serial lanes, undisturbed, to the last bit; on the device of threads those of an earlier step. A
pipeline lives for `--steps` draws; lives go through all schedules, kinds and dtypes of `fuzz_models.py` before any
comes again.

    --only schedule=dualpipev|zb-v,kind=tied,dtype=bfloat16     fewer of them; also num_mb, num_classes, aux, ep, ...
    --repeat 0.7.13                                             the life of a draw that failed, again and again

What fails is told on stderr with the command that repeats it. The last line is JSON on stdout: draws, failures,
seconds, those of CPU that ranks took, and at which draw the first failed. Exits with 1 where something did.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import treadle
import treadle.moe
import treadle.runtime
from tests.support.delays import Delays
from tests.support.devices import DEVICE_TYPE, device_of
from tests.support.experts import named_grads, named_parts
from tests.support.fuzz_models import (
    BATCHES,
    HOST,
    MOST_DIFFERENCE,
    SEED,
    Config,
    Grads,
    Sizes,
    combinations,
    draw_config,
    loss_fn,
    make_batch,
    make_model,
    own_part,
    run_whole,
    whole_name,
)
from tests.support.planted import ALL, apply
from tests.support.ranks import Outcome, run_ranks
from treadle import sim_device
from treadle.models.views import NamedView
from treadle.train.optim import OptimizerConfig, ShardedOptimizer

LR = 1e-2
UPDATES = OptimizerConfig(eps=0.1, weight_decay=0.0, bucket_mb=0.0001)
"""Of a sharded draw. With so large an eps an update is near linear in the gradient, where its sign is rounding."""

LATEST_S = 0.3
"""By how much a rank may come too late to the making of its pipeline."""


@dataclass(frozen=True)
class Life:
    """A pipeline and the draws it lives for. `seed` is that of the run, `number` that of the life in it."""

    seed: int
    number: int
    config: Config
    num_steps: int
    deadline_s: float
    stop: bool
    """Ends with the first draw that fails."""
    plant: str | None = None
    """A race that its ranks get planted (`planted.py`)."""

    def name(self, step: int) -> str:
        """The seed of a draw."""
        return f"{self.seed}.{self.number}.{step}"


@dataclass(frozen=True)
class Finding:
    """One draw that failed: where, and how."""

    life: Life
    step: int
    rank: int
    what: str

    def __str__(self) -> str:
        return f"draw {self.life.name(self.step)} ({self.life.config}), rank {self.rank}: {self.what}"


@dataclass
class Record:
    """What a rank saw: draws that it did, and what was wrong with them."""

    num_draws: int = 0
    findings: list[Finding] = field(default_factory=list)
    cpu_s: float = 0.0


# -- a rank ------------------------------------------------------------------------------------------------------------


class Runner:
    """One pipeline of a rank, with a copy of the model of its own."""

    def __init__(
        self, life: Life, rank: int, lanes: str, model: list[nn.Sequential] | None = None, device: torch.device = HOST
    ) -> None:
        config, self.device = life.config, device
        pp_rank, self.replica = divmod(rank, config.dp * config.ep)
        self.config, self.ep_rank = config, self.replica % config.ep
        model = model or own_part(config, self.ep_rank)
        placed = enumerate(config.made.placement.stages[pp_rank])
        self.stages: dict[int, nn.Module] = {}
        self.numbers: dict[int, int] = {}
        for chunk, number in placed:
            self.stages[chunk], self.numbers[chunk] = model[number].to(device), number
        self.pipe = treadle.Pipeline(
            self.stages,
            config.made,
            mesh=config.mesh(device.type),
            loss_fn=loss_fn,
            deadline_s=life.deadline_s,
            seed=SEED,
            lanes=lanes,  # type: ignore[arg-type]
            saved="offload" if config.kind == "offload" else "leave",
            tied=config.ties or None,
            shapes="each" if config.unequal else "same",
            recompute=tuple(config.recompute.split("+")) if config.recompute else (),
        )
        self.optimizer = ShardedOptimizer(self.pipe, self._views(), UPDATES) if config.kind == "sharded" else None

    def _views(self) -> list[NamedView]:
        """In the order of their names, which copies of a stage have alike."""
        named = ((self.numbers[chunk], part) for chunk, stage in self.stages.items() for part in named_parts(stage))
        views = [NamedView(f"{at}.{name}", param, () if part is None else (part,)) for at, (name, param, part) in named]
        return sorted(views, key=attrgetter("name"))

    def step(self, number: int, batch: tuple[list[Tensor], list[Tensor]] | None = None) -> Step:
        """The loss and this rank's gradients, by their names in the whole model, for a batch."""
        for stage in self.stages.values():
            for param in stage.parameters():
                param.grad = None
        loss = float(self.pipe.step(*(batch or make_batch(self.config, number, self.replica, self.device))))
        if self.optimizer is not None:
            grads = self._whole_gradients(self.optimizer)
            self.optimizer.step(LR)
            self.optimizer.zero_grad()
            return loss, grads
        return loss, {
            f"{self.numbers[chunk]}.{whole_name(name, self.config, self.ep_rank)}": grad
            for chunk, stage in self.stages.items()
            for name, grad in named_grads(stage)
        }

    def _whole_gradients(self, optimizer: ShardedOptimizer) -> Grads:
        """The gradients of all parameters, from the shards of the ranks that divide them."""
        views = self._views()
        like: dict[str, Any] = {"dtype": torch.float64, "device": self.device}
        flat = {view.name: torch.zeros(view.of(view.tensor).numel(), **like) for view in views}
        used = dict.fromkeys(flat, 0.0)
        for piece in optimizer.pieces():
            if piece.gradient is not None:
                flat[piece.view.name][piece.run.first : piece.run.last] = piece.gradient
                used[piece.view.name] = 1.0
        group, found = self.pipe.reduce_group, Grads()
        for view in views:
            whole = torch.cat([flat[view.name], torch.full((1,), used[view.name], **like)])
            if group is not None:
                group.all_reduce(whole)
            found[view.name] = whole[:-1].view(view.of(view.tensor).shape) if whole[-1] else None
        return found


Step = tuple[float, Grads]
"""The loss and the gradients of a step, on the host."""


class Wanted(NamedTuple):
    """What a step should come to: on serial lanes to the last bit, in one process within a tolerance of `sizes`.

    On the device of threads, in place of serial lanes, what the first step of a batch came to; None before that.
    """

    loss: float
    whole: Grads
    sizes: Sizes
    serial: Step | None


class References:
    """What steps should come to. Without dropout and updates a batch always comes to the same.

    A step on the device of threads takes ten times that of the CPU. So one process is on the CPU there, which draws the
    same numbers and may round others; and no pipeline has serial lanes.
    """

    def __init__(self, life: Life, rank: int) -> None:
        on_sim = DEVICE_TYPE == sim_device.NAME
        self.config, self.device = life.config, HOST if on_sim else device_of(rank)
        self.serial = None if on_sim else Runner(life, rank, "serial", device=self.device)
        self.whole = [stage.to(self.device) for stage in make_model(life.config)]
        self._updates = Updates(self.whole) if life.config.kind == "sharded" else None
        self._known: dict[int, Wanted] = {}

    def of(self, number: int, step: int) -> Wanted:
        """Both, for a batch; steps are asked for one after the other."""
        if number not in self._known or self._is_moving:
            loss, whole, sizes = run_whole(self.config, self.whole, number, step, self.device)
            if self._updates is not None:
                self._updates.step(whole)
            serial = on_host(self.serial.step(number)) if self.serial is not None else None
            self._known[number] = Wanted(*on_host((loss, whole)), sizes, serial)
        return self._known[number]

    def keep(self, number: int, got: Step) -> None:
        """Hold later steps of a batch to this one, where nothing else says which bits they should have."""
        if self.serial is None and not self._is_moving and self._known[number].serial is None:
            self._known[number] = self._known[number]._replace(serial=got)

    @property
    def _is_moving(self) -> bool:
        return self.config.dropout or self._updates is not None


class Updates:
    """AdamW in one process, with float32 masters of two-byte parameters."""

    def __init__(self, model: list[nn.Sequential]) -> None:
        named = [
            (f"{at}.{name}", param.detach() if part is None else param.detach()[part])
            for at, stage in enumerate(model)
            for name, param, part in named_parts(stage)
        ]
        self._params = dict(named)
        low = (torch.bfloat16,)
        self._masters = {n: p.float() if p.dtype in low else p.clone() for n, p in named}
        self._adamw = torch.optim.AdamW(
            self._masters.values(), lr=LR, betas=UPDATES.betas, eps=UPDATES.eps, weight_decay=0.0
        )

    @torch.no_grad()
    def step(self, grads: Grads) -> None:
        for name, master in self._masters.items():
            grad = grads[name]
            master.grad = grad.to(master.dtype) if grad is not None else None
        self._adamw.step()
        for name, param in self._params.items():
            param.copy_(self._masters[name])


def live(rank: int, life: Life) -> Record:
    """A rank's part of a life."""
    record, rng, begun_s = Record(), Random(f"{life.seed}/{life.number}/{rank}"), time.process_time()
    if life.plant is not None:
        apply(life.plant)
    torch.set_default_device(None)  # or a device that Treadle does not name would not be seen
    delays = Delays([Path(package.__path__[0]) for package in (treadle.runtime, treadle.moe)])
    time.sleep(rng.choice((0.0, rng.uniform(0.0, LATEST_S))))
    delays.install()
    step = 0
    try:
        runner, references = Runner(life, rank, "thread", device=device_of(rank)), References(life, rank)
        for step in range(life.num_steps):
            number = step % BATCHES
            wanted = references.of(number, step)
            with delays.armed(f"{life.name(step)}/{rank}"):
                time.sleep(rng.choice((0.0, 0.0, rng.uniform(0.0, 0.05))))
                pageable_copies()
                got = runner.step(number)
            copies, got = pageable_copies(), on_host(got)
            seen = [*differences(life.config, got, wanted), *copies]
            references.keep(number, got)
            wrong = [Finding(life, step, rank, what) for what in seen]
            record.findings += wrong
            record.num_draws += 1
            if life.stop and _anywhere(bool(wrong)):
                break
        for own in (runner, references.serial):
            if own is not None:
                own.pipe.close()
    except Exception as error:
        told = "".join(traceback.format_tb(error.__traceback__)[-3:])
        record.num_draws += 1
        record.findings.append(Finding(life, step, rank, f"raised {type(error).__name__}: {error}\n{told}"))
    finally:
        delays.remove()
    record.cpu_s = time.process_time() - begun_s
    return record


def pageable_copies() -> list[str]:
    """Copies since the last call that held the host, on a device that counts them."""
    waits = sim_device.take_waits() if sim_device.is_loaded() else {}
    return [f"{times} times {what}" for what, times in waits.items() if "pageable" in what]


def _anywhere(wrong: bool) -> bool:
    """Has any rank found something."""
    flag = torch.tensor(int(wrong), device="cpu")
    dist.all_reduce(flag)
    return bool(flag)


def on_host(step: Step) -> Step:
    """The same in the host's memory."""
    return step[0], {name: grad.to(HOST) if grad is not None else None for name, grad in step[1].items()}


def differences(config: Config, got: Step, wanted: Wanted) -> Iterator[str]:
    """What is not as it should be, a line a parameter."""
    (loss, grads), most = got, MOST_DIFFERENCE[config.dtype]
    serial_loss, serial = wanted.serial or got
    if loss != serial_loss:
        yield f"the loss is {loss!r}, on serial lanes or in an earlier step {serial_loss!r}"
    if abs(loss - wanted.loss) > most * abs(wanted.loss):
        yield f"the loss is {loss!r}, in one process {wanted.loss!r}"
    for name, grad in grads.items():
        size = wanted.sizes[name]
        off, off_serial = off_by(grad, wanted.whole[name], size), off_by(grad, serial[name], size)
        if off > most or not same_bits(grad, serial[name]):
            yield (
                f"gradient of {name} is off by {off:.3g} from one process's, by {off_serial:.3g} from that on serial "
                "lanes or of an earlier step"
            )


def off_by(grad: Tensor | None, want: Tensor | None, size: float) -> float:
    """The largest difference, relative to a size."""
    if grad is None or want is None:
        return 0.0 if grad is want else float("inf")
    most = float((grad.double() - want.double()).abs().max()) / max(size, 1e-300)
    return most if most == most else float("inf")


def same_bits(grad: Tensor | None, want: Tensor | None) -> bool:
    """True if both are the same numbers, or none."""
    if grad is None or want is None:
        return grad is want
    as_bytes = [tensor.contiguous().view(torch.uint8) for tensor in (grad, want)]
    return torch.equal(*as_bytes)


# -- all of them -------------------------------------------------------------------------------------------------------


def lives(args: Namespace) -> Iterator[Life]:
    """Lives for so many draws, each combination once before any comes again."""
    only = parse_only(args.only)
    every = combinations(only, args.seed)
    if not every:
        raise ValueError(f"--only {args.only} leaves no schedule, kind and dtype")
    part, num_parts = map(int, args.part.split("/"))
    for number in range(part, -(-args.draws // args.steps), num_parts):
        rng = Random(f"{args.seed}/{number}")
        config = draw_config(*every[number % len(every)], only, rng)
        num_steps = min(args.steps, args.draws - number * args.steps)
        yield Life(args.seed, number, config, num_steps, args.deadline, args.stop, args.plant)


def parse_only(text: str) -> dict[str, list[str]]:
    """`kind=tied,dtype=float32|float64` by name."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    known = ["schedule", "kind", "dtype", "num_mb", "num_classes", "num_layers", "dropout", "aux", "layered", "ep"]
    known += ["recompute", "mtp", "dense", "unequal"]
    for name, _, _ in pairs:
        if name not in known:
            raise ValueError(f"--only takes {', '.join(known)}, got {name!r}")
    return {name: values.split("|") for name, _, values in pairs}


def run_life(life: Life) -> Record:
    """A life on its processes; a rank that has no record is a finding too."""
    outcomes = run_ranks(life.config.world, live, life, new=life.plant is not None)
    whole = Record()
    for outcome in outcomes:
        record = outcome.value if outcome.value is not None else _lost(life, outcome)
        whole.num_draws = max(whole.num_draws, record.num_draws)
        whole.findings += record.findings
        whole.cpu_s += record.cpu_s
    return whole


def _lost(life: Life, outcome: Outcome[Record]) -> Record:
    return Record(1, [Finding(life, 0, outcome.rank, str(outcome))])


def run_all(every: Iterable[Life], jobs: int) -> Iterator[tuple[Life, Record]]:
    """Lives as they end, `jobs` at a time: a step under delays leaves the cores idle."""
    queue = iter(every)
    with ThreadPoolExecutor(jobs) as threads:
        running: dict[Future[Record], Life] = {}
        try:
            while True:
                while len(running) < jobs and (life := next(queue, None)) is not None:
                    running[threads.submit(run_life, life)] = life
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            for future in running:
                future.cancel()


def fuzz(args: Namespace) -> dict[str, object]:
    """Runs all draws; what the last line says."""
    begun, num_draws, failed, told, cpu_s = time.monotonic(), 0, set[str](), 0, 0.0
    first: int | None = None
    how = ""
    for life, record in run_all(lives(args), args.jobs):
        num_draws, cpu_s = num_draws + record.num_draws, cpu_s + record.cpu_s
        steps = sorted({finding.step for finding in record.findings})
        failed |= {life.name(step) for step in steps}
        if steps:
            first = min(first if first is not None else args.draws, life.number * args.steps + steps[0] + 1)
        for finding in record.findings[:3]:
            how = how or finding.what.partition("\n")[0]
            _tell(f"FAILED {finding}")
        if steps:
            _tell(f"  again: {command(args, life, steps[0])}")
        if num_draws - told >= args.draws / 20 or steps:
            told = num_draws
            _tell(f"{num_draws} of {args.draws} draws, {len(failed)} failed, {time.monotonic() - begun:.0f} s")
        if steps and args.stop:
            break
    return {
        "draws": num_draws,
        "failures": len(failed),
        "first": first,
        "how": how,
        "seeds": sorted(failed)[:20],
        "seconds": round(time.monotonic() - begun, 1),
        "cpu_s": round(cpu_s, 1),
    }


def repeat(args: Namespace) -> dict[str, object]:
    """The life of one draw, up to that draw, `--times` times."""
    seed, number, step = map(int, args.repeat.split("."))
    args.seed, args.draws, args.stop, args.part = seed, (number + 1) * args.steps, True, "0/1"
    (life,) = [life for life in lives(args) if life.number == number]
    life = replace(life, num_steps=step + 1)
    _tell(f"{life.config}, {step + 1} steps, {args.times} times")
    begun, failures, num_draws = time.monotonic(), 0, 0
    for _ in range(args.times):
        record = run_life(life)
        failures, num_draws = failures + bool(record.findings), num_draws + record.num_draws
        for finding in record.findings[:3]:
            _tell(f"FAILED {finding}")
    return {"draws": num_draws, "failures": failures, "seconds": round(time.monotonic() - begun, 1)}


def find(plant: str, only: str, draws: int, seed: int = 0, deadline_s: float = 60.0) -> dict[str, object]:
    """Runs draws with a race planted until one fails, in dtypes whose rounding is small; what the last line says.

    One pipeline at a time: a second beside it would run to its end after the first has failed.
    """
    only = f"dtype=float32|float64,aux=none,{only}"
    more = ["--plant", plant, "--only", only, "--draws", str(draws), "--seed", str(seed), "--steps", "10", "--stop"]
    more += ["--deadline", str(deadline_s)]
    return fuzz(parser().parse_args([*more, "--jobs", "1"]))


def command(args: Namespace, life: Life, step: int) -> str:
    """What repeats a draw."""
    only = f" --only {shlex.quote(args.only)}" if args.only else ""
    plant = f" --plant {args.plant}" if args.plant else ""
    return f"python -m tests.support.fuzz --repeat {life.name(step)} --steps {args.steps}{only}{plant}"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - a command


def parser() -> ArgumentParser:
    """The command line."""
    made = ArgumentParser(description="Steps under injected delays, against one process and serial lanes.")
    made.add_argument("--draws", type=int, default=2000, help="steps in all")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--steps", type=int, default=20, help="draws that one pipeline lives for")
    made.add_argument("--only", default="", help="e.g. kind=tied,dtype=bfloat16|float64")
    made.add_argument("--jobs", type=int, default=2, help="pipelines at once")
    made.add_argument("--deadline", type=float, default=60.0, help="seconds a rank waits for another")
    made.add_argument("--stop", action="store_true", help="at the first failure")
    made.add_argument("--plant", choices=ALL, help="a race that is planted first")
    made.add_argument("--part", default="0/1", help="1/3: of three parts of the draws, the second")
    made.add_argument("--repeat", help="the seed of a draw that failed")
    made.add_argument("--times", type=int, default=10, help="how often --repeat does")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Runs the command."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    args = parser().parse_args(arguments)
    result = repeat(args) if args.repeat else fuzz(args)
    print(json.dumps(result), flush=True)  # noqa: T201 - a command
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    from tests.support import fuzz as imported  # what goes to ranks must be found there by its module's name

    sys.exit(imported.main())
