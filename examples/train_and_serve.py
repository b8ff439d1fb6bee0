"""Serve a model while it trains: torchrun --nproc-per-node 4 examples/train_and_serve.py [--engine vllm] [--steps 150]

It needs: pip install '.[train,update]'

Four ranks train configs/moe_tiny.toml PP2 x EP2: each has its stages and its experts. An engine in a process of its own
continues a prompt all the time. Every few steps the ranks copy their parts of the model, train on, and a thread beside
the training puts the copies together in the engine. Version 1 is the untrained model.

For vLLM, `--python` is a Python that has it and Treadle. Other options are those of `python -m treadle.train`.
"""

import argparse
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
import torch.distributed as dist

from treadle.update import ClosedError, Endpoint, Source, UpdateOptions, Updater

if TYPE_CHECKING:  # the engine's Python has no trainer
    from treadle.train.run_log import StepFacts
    from treadle.train.trainer import Trainer

CONFIG = Path(__file__).parents[1] / "configs" / "moe_tiny.toml"
PROMPT, LENGTH = list(b"import "), 32

# ---- the engine's process: it reads the model's shape from a directory, and gets every version by an update ----------


def with_transformers(sockets: Path, model: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from treadle.update.adapters.transformers import Transformers

    engine = Transformers(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).eval())

    def generate() -> tuple[str, list[int]]:
        options = {"max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 256}
        with engine.serving():  # no update between the answer and the digest
            version, tokens = engine.generate(torch.tensor([PROMPT]), **options)
            return f"{version} (weights {engine.digest()[:8]})", tokens[0, len(PROMPT) :].tolist()

    with Endpoint(engine, sockets, worker=0):
        talk(generate)


def with_vllm(sockets: Path, model: Path) -> None:
    from vllm import LLM, SamplingParams

    from treadle.update.adapters.vllm import Offline, Replica

    llm = LLM(
        str(model),
        worker_extension_cls="treadle.update.adapters.vllm.Extension",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=32 << 20,
        dtype="float32",
    )
    greedy = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)

    def generate() -> tuple[str, list[int]]:
        with replica.serving() as version:
            made = llm.generate({"prompt_token_ids": PROMPT}, greedy, use_tqdm=False)
        return str(version), list(made[0].outputs[0].token_ids)

    with Replica(Offline(llm), sockets) as replica:
        talk(generate)


ENGINES = {"transformers": with_transformers, "vllm": with_vllm}


def talk(generate: Callable[[], tuple[str, list[int]]]) -> None:
    """Answer again and again, and print the first answer of each version, until the trainer has closed the pipe."""
    shown, num_answers, over = "", 0, False
    while not over:
        over = bool(select.select([sys.stdin], [], [], 0.2)[0])
        try:
            version, tokens = generate()
        except ClosedError:
            continue
        if version != shown:
            text = bytes(token for token in (*PROMPT, *tokens) if token < 256).decode(errors="replace")
            before = f", after {num_answers} answers of the one before" if shown else ""
            print(f"the engine serves version {version}{before}: {text!r}", flush=True)  # noqa: T201
            shown, num_answers = version, 0
        num_answers += 1


# ---- the trainer's processes -----------------------------------------------------------------------------------------


class Push:
    """Brings the weights of every n-th step to the engine while the next steps run; all ranks call it after a step."""

    def __init__(self, trainer: "Trainer", updater: Updater, every: int) -> None:
        self.trainer, self.updater, self.every = trainer, updater, every
        self.thread, self.version = ThreadPoolExecutor(1), 0
        self.under_way: Future[None] | None = None

    def __call__(self, told: "StepFacts") -> None:
        if told.step % self.every == 0:
            self.start()

    def start(self) -> None:
        """Copy this rank's part of the model, and begin the update. An earlier one is waited for."""
        began = time.perf_counter()
        self.wait()
        weights = {view.name: view.of(view.tensor.detach()).clone() for view in self.trainer.views}
        stood_s = time.perf_counter() - began
        self.version += 1
        self.under_way = self.thread.submit(self._update, Source.of(weights), self.trainer.step, stood_s)

    def wait(self) -> None:
        """Wait until the last version is served. Raises UpdateError where it cannot be."""
        if self.under_way is not None:
            self.under_way.result()

    def _update(self, source: Source, step: int, stood_s: float) -> None:
        done = self.updater.update(source, self.version)
        if dist.get_rank() == 0:
            took_s = done.seconds["total"] - done.seconds["enter"]  # before, it waits for engine and ranks to be there
            took = f"{done.size_bytes / 1e6:.1f} MB in {took_s:.2f} s, training stood still for {stood_s:.3f} s"
            print(f"version {done.version} has the weights of step {step}: {took}", flush=True)  # noqa: T201


def train(args: argparse.Namespace, more: list[str]) -> None:
    from treadle.models.saving import save_pretrained
    from treadle.train.command import parse_command
    from treadle.train.trainer import Trainer

    fixed = ["--parallel.pp=2", "--parallel.ep=2", f"--training.steps={args.steps}", "--training.decay_steps=0"]
    with ExitStack() as stack:
        dist.init_process_group("gloo")
        stack.callback(dist.destroy_process_group)
        rank = dist.get_rank()
        place = [stack.enter_context(tempfile.TemporaryDirectory(prefix="treadle-serve-")) if rank == 0 else ""]
        dist.broadcast_object_list(place)
        output = args.output if args.output is not None else f"{place[0]}/run"
        config = parse_command([f"--config={CONFIG}", *fixed, f"--output={output}", *more])
        trainer = Trainer(config)
        stack.callback(trainer.close)
        sockets, model = Path(place[0]), Path(place[0]) / "untrained"
        save_pretrained(trainer.stages, config.model, model)
        if rank == 0:
            command = [args.python, __file__, f"--serve={sockets}", f"--engine={args.engine}"]
            engine = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)  # it ends when the pipe closes
            stack.callback(engine.communicate)
        options = UpdateOptions(deadline_s=900)  # the engine starts meanwhile
        worker = 0 if rank == 0 else None  # the other ranks have no engine beside them
        updater = stack.enter_context(Updater(sockets, ledger=sockets / "ledger", worker=worker, options=options))
        push = Push(trainer, updater, args.every)
        push.start()
        push.wait()
        trainer.run(after_step=push)
        push.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=sorted(ENGINES), default="transformers")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--output")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args, more = parser.parse_known_args()
    if args.serve is not None:
        ENGINES[args.engine](args.serve, args.serve / "untrained")
    else:
        train(args, more)


if __name__ == "__main__":
    main()
