"""vLLM engines in processes of their own, checkpoints for them, and update ranks that get into trouble beside them."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from tests.support.paths import ROOT
from tests.support.patience import PATIENT_S
from tests.support.update.crashes import arm
from tests.support.update.faults import Case, Report
from tests.support.watching import Watching
from treadle.update import Source, UpdateError, UpdateOptions, Updater
from treadle.update.protocol.update_messages import Close
from treadle.update.rank.checkpoint import read_checkpoint
from treadle.weights.buffer_sizes import Memory
from treadle.weights.tensor_boxes import Box

SMALL = Memory(1 << 20, target_bytes=1 << 16, least_bytes=1 << 14)
NUM_SEEDS = 3
NUM_TOKENS = 8
PROMPTS = [list(range(3, 80)), [7 * i % 512 for i in range(1, 90)]]
START_S = 420.0
HANG_DEADLINE_S = 4.0

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.2,  # logits far enough apart that tokens do not hang on the order of a sum
    "tie_word_embeddings": False,
}


def seed_of(version: int) -> int:
    """Versions that follow each other differ."""
    return (version - 1) % NUM_SEEDS


def make_checkpoints(directory: Path, kind: str, dtype: torch.dtype) -> list[Path]:
    """The same model with other weights, by seed."""
    transformers: Any = importlib.import_module("transformers")

    made = []
    for seed in range(NUM_SEEDS):
        torch.manual_seed(seed)
        if kind == "moe":
            config = transformers.Qwen3MoeConfig(
                **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
            )
            model = transformers.Qwen3MoeForCausalLM(config)
        else:
            model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE))
        made.append(directory / f"{kind}{seed}")
        model.to(dtype).save_pretrained(made[-1])
    return made


def _spawn(task: dict[str, Any], env: dict[str, str], log: Path) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    paths = [str(ROOT), str(ROOT / "src"), env.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    env = (
        os.environ
        | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ":".join(filter(None, paths))}
        | env
    )
    command = [sys.executable, "-m", "tests.support.update.vllm_engine", str(theirs.fileno()), json.dumps(task)]
    with log.open("ab") as out:
        # No session of its own: Linux 6.18 shares the cores between sessions, and one that spins and has many threads
        # that wake often, as vLLM's, kept all others from running for minutes.
        process = subprocess.Popen(
            command, env=env, pass_fds=[theirs.fileno()], stdout=out, stderr=out, process_group=0
        )
    theirs.close()
    return process, ours


def fresh_tokens(models: list[dict[str, Any]], log: Path) -> list[list[list[int]]]:
    """The tokens of engines that have just loaded these models, by model and prompt."""
    task = {"kind": "fresh", "models": models, "prompts": PROMPTS, "num": NUM_TOKENS}
    process, stream = _spawn(task, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, log)
    stream.settimeout(START_S)
    try:
        line = stream.makefile("r").readline()
        assert line, log.read_text()[-4000:]
        tokens: list[list[list[int]]] = json.loads(line)
        return tokens
    finally:
        _end(process)
        stream.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process group, which has vLLM's processes in it. They get time: the last one removes shared memory."""
    until = time.monotonic() + 60
    with suppress(ProcessLookupError):
        while time.monotonic() < until:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Engine:
    """A replica in a process of its own, which can be started again at the same place."""

    def __init__(self, task: dict[str, Any], env: dict[str, str]) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="treadle-v"))
        self.sockets, self.ledger = self.directory / "s", self.directory / "l"
        self.sockets.mkdir(mode=0o700)
        self.log = self.directory / "log"
        self.task = task | {"directory": str(self.sockets), "prompt": PROMPTS[0], "num": NUM_TOKENS}
        self.env = env
        self.start()

    def start(self) -> None:
        self.process, self.stream = _spawn(dict(self.task), dict(self.env), self.log)
        self.waiting: dict[int, Future[dict[str, Any]]] = {-1: Future()}
        self.lock = threading.Lock()
        self.number = 0
        threading.Thread(target=self._read, daemon=True).start()
        self.fresh = self.waiting[-1].result(START_S)["tokens"]

    def restart(self) -> None:
        self.stop()
        self.start()

    def _read(self) -> None:
        waiting = self.waiting
        with suppress(OSError):
            for line in self.stream.makefile("r"):
                answer = json.loads(line)
                waiting.pop(answer.get("id", -1)).set_result(answer)
        for future in list(waiting.values()):
            future.set_exception(EOFError(f"the engine's process ended:\n{self.log.read_text()[-6000:]}"))

    def order(self, do: str, **more: Any) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        with self.lock:
            self.number += 1
            self.waiting[self.number] = future
            self.stream.sendall(json.dumps({"do": do, "id": self.number, **more}).encode() + b"\n")
        return future

    def generate(self, prompt: int = 0, wait_s: float = 0.0, num: int = NUM_TOKENS) -> dict[str, Any]:
        order = self.order("generate", prompt=PROMPTS[prompt], num=num, wait_s=wait_s)
        return order.result(60 + wait_s)

    def trouble(self, case: Case, mark: Path) -> None:
        if case.trouble is not None:
            trouble = case.trouble
            args = [case.worker, trouble.act, trouble.method, trouble.at, trouble.hang_s, str(mark)]
            answer = self.order("treadle_trouble", args=args).result(60)
            assert answer["answers"] == [None, None], answer

    def stop(self) -> None:
        """Stop the engine; kill it where it does not end."""
        with suppress(OSError):
            self.order("stop")
        _end(self.process)
        self.stream.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        shutil.rmtree(self.directory)


def update(
    rank: int,
    places: tuple[Path, Path],
    checkpoints: list[Path],
    world: int,
    versions: list[int],
    close: Close = "drain",
) -> list[int]:
    """Brings these versions, one after the other."""
    with Updater(places[0], ledger=places[1], options=UpdateOptions(SMALL, rollback="host", close=close)) as updater:
        made = []
        for version in versions:
            source = read_checkpoint(checkpoints[seed_of(version)], rank, world)
            made.append(updater.update(source, version).version)
        return made


def update_targeted(
    rank: int, places: tuple[Path, Path], checkpoints: list[Path], world: int, versions: list[int]
) -> list[tuple[int, dict[str, Box]]]:
    """Bring these versions; of each, the bytes moved to all workers, and what this rank's worker wants of the next."""
    with Updater(
        places[0], ledger=places[1], options=UpdateOptions(SMALL, rollback="host", transfer="targeted")
    ) as updater:
        made = []
        for version in versions:
            done = updater.update(read_checkpoint(checkpoints[seed_of(version)], rank, world), version)
            worker = updater.context.worker
            wants = worker.layout(worker.settled_in(PATIENT_S).layout, PATIENT_S)
            made.append((done.size_bytes, {piece.tensor: piece.box for piece in wants.pieces}))
        return made


def recover(rank: int, places: tuple[Path, Path], checkpoints: list[Path], world: int, version: int) -> int:
    """Brings the committed version to workers that have lost it."""
    with Updater(places[0], ledger=places[1], options=UpdateOptions(SMALL, rollback="host")) as updater:
        return updater.recover(read_checkpoint(checkpoints[seed_of(version)], rank, world), version).version


def update_from_parts(rank: int, places: tuple[Path, Path], checkpoints: list[Path], world: int, version: int) -> int:
    """Bring a version of which each of PP2 x EP2 ranks has a part. Only rank 0 has an engine beside it."""
    whole = read_checkpoint(checkpoints[seed_of(version)], 0, 1)
    part = {piece.tensor: weight for piece, weight in whole.held.items() if _is_of_rank(rank, piece.tensor)}
    assert 0 < len(part) < len(whole.held)
    with ExitStack() as stack:
        worker, options = 0 if rank == 0 else None, UpdateOptions(SMALL, rollback="host")
        updater = stack.enter_context(
            Updater(places[0], ledger=places[1], worker=worker, options=options, takeover=True)
        )
        return updater.update(Source.of(part), version).version


def _is_of_rank(rank: int, name: str) -> bool:
    """Whether a rank of PP2 x EP2 has a tensor: layers in two halves, four experts in two halves."""
    stage, part = divmod(rank, 2)
    layer, expert = re.search(r"layers\.(\d+)", name), re.search(r"experts\.(\d+)", name)
    at = int(layer[1]) if layer else int(name != "model.embed_tokens.weight")
    return at == stage and (expert is None or int(expert[1]) // 2 == part)


def change(rank: int, places: tuple[Path, Path], checkpoints: list[Path], world: int, version: int) -> str:
    """Update with one changed tensor; the notes."""
    with Updater(places[0], ledger=places[1], options=UpdateOptions(SMALL, rollback="host")) as updater:
        source = read_checkpoint(checkpoints[seed_of(version)], rank, world)
        changed = ["model.layers.0.self_attn.q_proj.weight"]
        return "\n".join(updater.update(source, version, changed=changed, base=version - 1).notes)


def attempt(
    rank: int, places: tuple[Path, Path], checkpoints: list[Path], world: int, version: int, case: Case, mark: Path
) -> Report:
    """Update with a fault."""
    hangs = case.trouble is not None and case.trouble.act == "hang"
    report = Report()
    with Updater(
        places[0],
        ledger=places[1],
        options=UpdateOptions(SMALL, rollback="host", deadline_s=HANG_DEADLINE_S if hangs else 30),
    ) as updater:
        arm(updater, case.crash, case.flip, mark)
        try:
            updater.update(read_checkpoint(checkpoints[seed_of(version)], rank, world), version)
            report.served = version
        except UpdateError as error:
            report.error, report.who, report.committed = str(error), error.who, error.committed
            report.raised_s, report.corrupt = time.monotonic(), error.corrupt
    return report


def _machine() -> dict[str, float]:
    """Seconds since boot in which the machine was stolen from, or processes waited, where the kernel tells."""
    stolen = Path("/proc/stat").read_text().split("\n", 1)[0].split()[8]
    told = {"seconds": time.monotonic(), "stolen": int(stolen) / os.sysconf("SC_CLK_TCK")}
    for what in ("cpu", "io"):
        with suppress(OSError):
            waited = Path(f"/proc/pressure/{what}").read_text().split("total=")[1].split()[0]
            told[f"waited for {what}"] = int(waited) / 1e6
    return told


@dataclass
class Watcher(Watching):
    """Asks the engine over and over."""

    engine: Engine
    seen: list[tuple[int, list[int]]] = field(default_factory=list)
    closed: int = 0
    died: int = 0

    def __enter__(self) -> Self:
        self._before = _machine()
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        if error is not None:
            waited = ", ".join(f"{name} {now - self._before[name]:.1f}" for name, now in _machine().items())
            error.add_note(f"{waited}; the engine's log ends with\n{self.engine.log.read_text()[-3000:]}")

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            try:
                answer = self.engine.generate()
            except (OSError, EOFError):  # it is started again
                continue
            if "tokens" in answer:
                self.seen.append((answer["version"], answer["tokens"]))
            elif "closed" in answer:
                self.closed += 1
            else:
                self.died += 1
