"""vLLM's trainer interface: FSDP2 ranks send to a running engine of two workers, through its own calls.

`.ci/vllm` runs these with a vLLM in an environment of its own, which is the engine. Trainer ranks import it, or the
Python modules of a later one, which `TREADLE_VLLM_MODULES` names: the trainer's side of weight transfer needs no more.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here; .ci/vllm runs these tests where it is", allow_module_level=True)

from tests.support.paths import ROOT
from tests.support.update.vllm import Engine, fresh_tokens, make_checkpoints
from tests.update.test_vllm import plugin

WORKERS, TRAINERS = 2, 2
MODULES = os.environ.get("TREADLE_VLLM_MODULES")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_checkpoints(tmp_path_factory.mktemp("models"), "dense", torch.float32)


def model_of(path: Path) -> dict[str, Any]:
    return {"model": str(path), "dtype": "float32"}


@pytest.fixture(scope="module")
def tokens(checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Future[list[list[list[int]]]]:
    made: Future[list[list[list[int]]]] = Future()
    log = tmp_path_factory.mktemp("log") / "log"

    def load() -> None:
        try:
            made.set_result(fresh_tokens([model_of(path) for path in checkpoints], log))
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=load).start()
    return made


@pytest.fixture(scope="module")
def engine(checkpoints: list[Path], tokens: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    task = {"kind": "online", "tensor_parallel_size": WORKERS, **model_of(checkpoints[2])}
    extra = str(plugin(tmp_path_factory.mktemp("plugin")))
    with Engine(task, {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "PYTHONPATH": extra}) as made:
        yield made


class Trainer:
    """The ranks of a trainer. Their client's calls go to the engine."""

    def __init__(self, engine: Engine, model: Path, tmp_path: Path, modules: str | None) -> None:
        self.engine = engine
        self.calls: list[str] = []
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        paths = [modules, str(ROOT), str(ROOT / "src")]
        env = {**os.environ, "PYTHONPATH": ":".join(filter(None, paths)), "GLOO_SOCKET_IFNAME": "lo"}
        task = {"world": TRAINERS, "workers": WORKERS, "port": port, "store": str(tmp_path / "store")}
        task |= {"directory": str(engine.sockets), "ledger": str(engine.ledger), "model": str(model)}
        self.log = tmp_path / "trainer.log"
        self.ranks = []
        for rank in range(TRAINERS):
            command = [sys.executable, "-m", "tests.support.update.vllm_trainer", json.dumps({**task, "rank": rank})]
            with self.log.open("ab") as log:
                process = subprocess.Popen(
                    command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
                )
            self.ranks.append(process)
        for process in self.ranks:
            assert self._answer(process) == {"up": True}

    def send(self, checkpoint: Path) -> list[dict[str, Any]]:
        """What each rank says of an update with these weights."""
        for process in self.ranks:
            self._write(process, str(checkpoint))
        return [self._answer(process) for process in self.ranks]

    def _write(self, process: subprocess.Popen[str], what: object) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(what) + "\n")
        process.stdin.flush()

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        while True:
            line = process.stdout.readline()
            assert line, self.log.read_text()[-4000:] + self.engine.log.read_text()[-4000:]
            answer: dict[str, Any] = json.loads(line)
            if "call" not in answer:
                return answer
            self.calls.append(answer["call"])
            made = self.engine.order(answer["call"], args=answer["args"]).result(120)
            failed = made.get("error") or [each for each in made["answers"] if each is not None]
            self._write(process, failed or None)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *args: object) -> None:
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.ranks:
            try:
                process.wait(60)
            finally:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()


@pytest.mark.parametrize("modules", [None, *filter(None, [MODULES])])
def test_fsdp_shards_into_two_workers(
    modules: str | None,
    engine: Engine,
    checkpoints: list[Path],
    tokens: Future[list[list[list[int]]]],
    tmp_path: Path,
) -> None:
    """A trainer that starts anew goes on after the committed version, with ranks beside the workers of its own."""
    before = engine.generate().get("version", 0)
    with Trainer(engine, checkpoints[2], tmp_path, modules) as trainer:
        first, second = trainer.send(checkpoints[0])
        assert first["version"] == second["version"] == before + 1, (first, second)
        answer = engine.generate(wait_s=30)
        assert (answer["version"], answer["tokens"]) == (before + 1, tokens.result()[0][0])
        assert trainer.calls == [
            "init_weight_transfer_engine",
            "start_weight_update",
            "update_weights",
            "finish_weight_update",
        ]
        first, second = trainer.send(checkpoints[1])
        assert first["version"] == second["version"] == before + 2
        answer = engine.generate(wait_s=30)
        assert (answer["version"], answer["tokens"]) == (before + 2, tokens.result()[1][0])
    assert engine.generate()["version"] == before + 2, "it goes on when the trainer has ended"
