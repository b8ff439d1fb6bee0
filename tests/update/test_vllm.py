"""Updates of vLLM on CPU: tokens are those of the same weights loaded afresh, and no mixture is served, whatever fails.

`.ci/vllm` runs these with a vLLM in an environment of its own.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here; .ci/vllm runs these tests where it is", allow_module_level=True)

from tests.support.patience import SOON_S
from tests.support.ranks import Outcome, check, run_ranks
from tests.support.update.crashes import Crash, Flip
from tests.support.update.faults import Case, Report, shared_memory
from tests.support.update.vllm import (
    HANG_DEADLINE_S,
    NUM_SEEDS,
    NUM_TOKENS,
    PROMPTS,
    Engine,
    Watcher,
    attempt,
    change,
    fresh_tokens,
    make_checkpoints,
    recover,
    seed_of,
    update,
    update_from_parts,
    update_targeted,
)
from tests.support.update.workers import Trouble
from treadle.update.protocol.update_messages import Close
from treadle.update.rank.checkpoint import described
from treadle.weights.tensor_boxes import Box

LONG = 3500
DTYPES = {"dense": torch.float32, "moe": torch.bfloat16}


@dataclass(frozen=True)
class Models:
    """Checkpoints by seed, and what engines generate that load them afresh: by seed and prompt."""

    checkpoints: list[Path]
    tokens: Future[list[list[list[int]]]]

    def right(self, answer: dict[str, Any], version: int, prompt: int = 0) -> None:
        assert answer.get("version") == version, answer
        assert answer["tokens"] == self.tokens.result()[seed_of(version)][prompt], (version, prompt)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Models]]:
    """Loaded on one rank, beside the start of other engines; in float32 the tokens of two ranks are the same."""
    directory = tmp_path_factory.mktemp("models")
    dense, moe = (make_checkpoints(directory, kind, DTYPES[kind]) for kind in DTYPES)
    fresh: dict[str, Future[list[list[list[int]]]]] = {kind: Future() for kind in DTYPES}

    def load() -> None:
        made = [model_of(kind, path) for kind, paths in (("dense", dense), ("moe", moe)) for path in paths]
        try:
            tokens = fresh_tokens(made, directory / "log")
            assert len({json.dumps(one) for one in tokens}) == 2 * NUM_SEEDS
            fresh["dense"].set_result(tokens[:NUM_SEEDS])
            fresh["moe"].set_result(tokens[NUM_SEEDS:])
        except BaseException as error:
            for future in fresh.values():
                future.set_exception(error)

    thread = threading.Thread(target=load)
    thread.start()
    yield {"dense": Models(dense, fresh["dense"]), "moe": Models(moe, fresh["moe"])}
    thread.join()


def model_of(kind: str, path: Path) -> dict[str, Any]:
    return {"model": str(path), "dtype": str(DTYPES[kind]).removeprefix("torch.")}


def vllm_memory() -> set[str]:
    """What vLLM has in /dev/shm."""
    return {name for name in shared_memory() if name.startswith(("vllm", "psm_", "sem."))}


@dataclass
class Served:
    """A replica that lives through many updates, and the version it serves."""

    engine: Engine
    models: Models
    world: int
    version: int = 0

    @property
    def args(self) -> tuple[tuple[Path, Path], list[Path], int]:
        return (self.engine.sockets, self.engine.ledger), self.models.checkpoints, self.world

    def update(self, version: int, close: Close = "drain") -> None:
        assert check(run_ranks(self.world, update, *self.args, [version], close)) == [[version]] * self.world
        self.version = version

    def serves(self, version: int, wait_s: float = 0.0) -> None:
        for prompt in range(len(PROMPTS)):
            self.models.right(self.engine.generate(prompt, wait_s), version, prompt)


@pytest.fixture(scope="module")
def dense(models: dict[str, Models]) -> Iterator[Served]:
    before = vllm_memory()
    made = model_of("dense", models["dense"].checkpoints[2])
    with Engine({"kind": "offline", "tensor_parallel_size": 2, **made}, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}) as engine:
        yield Served(engine, models["dense"], 2)
    assert not vllm_memory() - before


def test_tokens_are_those_of_a_fresh_load_three_times(dense: Served) -> None:
    assert dense.engine.fresh == dense.models.tokens.result()[2][0]  # two ranks, one rank
    assert "closed" in dense.engine.generate()
    with Watcher(dense.engine) as watcher:
        held = dense.engine.order("generate", prompt=PROMPTS[0], num=NUM_TOKENS, wait_s=100)
        for version in (1, 2, 3):
            dense.update(version)
            dense.serves(version)
    dense.models.right(held.result(1), 1)  # it waited for the first version
    for version, tokens in watcher.seen:
        dense.models.right({"version": version, "tokens": tokens}, version)
    assert watcher.closed
    assert not watcher.died


def test_each_worker_is_brought_what_its_loaders_read(dense: Served) -> None:
    """Of all matrices a half, of which fused ones (qkv, gate and up) are made, too; of vectors all."""
    shapes = {tensor.name: tensor.shape for tensor in described(dense.models.checkpoints[0])}
    first, last = dense.version + 1, dense.version + 3
    told = check(run_ranks(2, update_targeted, *dense.args, list(range(first, last + 1))))
    dense.version = last
    dense.serves(last)
    for rank, updates in enumerate(told):
        moved, wants = updates[-1]
        assert wants == {name: half(name, shape, rank) for name, shape in shapes.items()}
        assert moved == sum(4 * half(name, shape, 0).num_elements * 2 for name, shape in shapes.items())


def half(name: str, shape: tuple[int, ...], rank: int) -> Box:
    if len(shape) == 1:
        return Box.whole(shape)
    dim = int("o_proj" in name or "down_proj" in name)
    size = shape[dim] // 2
    start, stop = [0, 0], list(shape)
    start[dim], stop[dim] = rank * size, (rank + 1) * size
    return Box(tuple(start), tuple(stop))


def test_all_tensors_move_where_only_one_is_said_to_have_changed(dense: Served) -> None:
    """All tensors have changed in truth: tokens would be wrong if only that one had moved."""
    if not dense.version:
        dense.update(1)
    dense.version += 1
    for told in check(run_ranks(2, change, *dense.args, dense.version)):
        assert "all tensors move: the engines of workers 0, 1 take all or none" in told
    dense.serves(dense.version, wait_s=20)


FAULTS: dict[str, Case] = {
    "worker 0 raises in load": Case(1, worker=0, trouble=Trouble("raise", "load", 2)),
    "worker 1 raises in finish": Case(2, worker=1, trouble=Trouble("raise", "finish")),
    "worker 1 hangs": Case(3, worker=1, trouble=Trouble("hang", "load", 5, hang_s=8.0)),
    "worker 0 loses its socket": Case(4, worker=0, trouble=Trouble("socket", "load", 3)),
    "worker 1 loses its socket at the start": Case(5, worker=1, trouble=Trouble("socket", "begin")),
    "update rank 1 is killed": Case(6, crash=Crash(1, "bucket", bucket=4)),
    "the coordinator is killed": Case(7, crash=Crash(0, "bucket", bucket=9)),
    "a byte changes for worker 0": Case(8, flip=Flip(0, 1)),
    "a byte changes for worker 1": Case(9, flip=Flip(1, 12)),
    "worker 1 is killed": Case(10, worker=1, trouble=Trouble("kill", "load", 6)),
}


def judge(case: Case, outcomes: list[Outcome[Report]], mark: Path) -> None:
    """Every rank that lives raised in time and named who."""
    told = "\n".join(map(str, outcomes))
    for outcome in outcomes:
        if case.crash is not None and outcome.rank == case.crash.rank:
            assert outcome.exitcode == -signal.SIGKILL, told
            continue
        report = check([outcome])[0]
        assert report.error, told
        assert case.culprit in report.who, f"{report.who!r} named, not {case.culprit!r}\n{told}"
        assert report.corrupt == (case.flip is not None), told
        if case.flip is None:
            waits_s = HANG_DEADLINE_S if case.trouble is not None and case.trouble.act == "hang" else 0.0
            assert report.raised_s - float(mark.read_text()) - waits_s < SOON_S, told


@pytest.mark.parametrize("name", FAULTS)
def test_no_mixture_is_served_and_the_next_try_succeeds(name: str, dense: Served, tmp_path: Path) -> None:
    case, mark, old = FAULTS[name], tmp_path / "mark", dense.version
    if not old:
        dense.update(1)
        old = 1
    dense.engine.trouble(case, mark)
    with Watcher(dense.engine) as watcher:
        outcomes = run_ranks(2, attempt, *dense.args, old + 1, case, mark)
        judge(case, outcomes, mark)
        if case.trouble is not None and case.trouble.act == "kill":
            is_lost(dense, f"worker {case.worker} is lost")
            dense.engine.restart()
            assert "closed" in dense.engine.generate()
            assert check(run_ranks(2, recover, *dense.args, old)) == [old, old]
        dense.serves(old, wait_s=20)
        dense.update(old + 1)
    for version, tokens in watcher.seen:
        assert version in (old, old + 1)
        dense.models.right({"version": version, "tokens": tokens}, version)
    assert not watcher.died
    dense.serves(old + 1)


def is_lost(dense: Served, text: str) -> None:
    """The gate says so at once, and the replica removes the shared memory of the engine's processes."""
    answer = dense.engine.generate()
    assert text in answer["closed"], answer
    until = time.monotonic() + 40
    while any("cpushm" in name for name in vllm_memory()):
        assert time.monotonic() < until, vllm_memory()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def moe(models: dict[str, Models], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """AsyncLLM with Treadle as its weight transfer engine, a plugin; and a canary that is wrong for version 4."""
    tokens = models["moe"].tokens.result()
    canary = {version: tokens[seed_of(version)][0] for version in (1, 2, 3, 5)} | {4: tokens[seed_of(5)][0]}
    task = {"kind": "online", "canary": canary, **model_of("moe", models["moe"].checkpoints[2])}
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0", "PYTHONPATH": str(plugin(tmp_path_factory.mktemp("plugin")))}
    before = vllm_memory()
    with Engine(task, env) as engine:
        yield Served(engine, models["moe"], 1)
    assert not vllm_memory() - before


def plugin(directory: Path) -> Path:
    """The entry point as an installed package declares it."""
    about = directory / "treadle_plugin-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: treadle-plugin\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ntreadle = treadle.update.adapters.vllm.transfer:register\n"
    )
    return directory


def test_experts_too_three_times(moe: Served) -> None:
    for version in (1, 2, 3):
        moe.update(version)
        moe.serves(version)


def test_vllm_can_ask_for_the_version(moe: Served) -> None:
    calls = ("start_weight_update",), ("update_weights", {"version": moe.version}), ("finish_weight_update",)
    for method, *args in calls:
        assert moe.engine.order(method, args=args).result(60).get("answers") == [None]
    moe.engine.order("start_weight_update", args=[]).result(60)
    wrong = moe.engine.order("update_weights", args=[{"version": moe.version + 1}]).result(60)
    assert f"version {moe.version + 1} is not served here" in wrong["error"]
    moe.serves(moe.version)


def test_a_canary_that_differs_keeps_the_replica_closed(moe: Served, tmp_path: Path) -> None:
    report = check(run_ranks(1, attempt, *moe.args, 4, Case(0), tmp_path / "mark"))[0]
    assert "of the canary, its source" in report.error
    assert report.committed
    assert "closed" in moe.engine.generate()
    moe.update(5)
    moe.serves(5)


def test_requests_are_broken_off_where_that_is_asked_for(moe: Served) -> None:
    if moe.version < 5:
        moe.update(5)
    answers: list[dict[str, Any]] = []
    ended = threading.Event()

    def ask() -> None:
        """One long request after the other, until one is broken off or not let in."""
        while not ended.is_set():
            answer = moe.engine.order("generate", prompt=PROMPTS[0], num=LONG, wait_s=0).result(100)
            if "closed" in answer:
                return
            answers.append(answer)
            if len(answer["tokens"]) < LONG:
                return

    with ThreadPoolExecutor(24) as pool:
        asking = [pool.submit(ask) for _ in range(24)]
        time.sleep(0.2)
        try:
            moe.update(6, close="abort")
        finally:
            ended.set()  # or an update that failed would be waited for without an end
        for each in asking:
            each.result()
    assert {answer["version"] for answer in answers} == {5}
    assert any(0 < len(answer["tokens"]) < LONG for answer in answers)
    moe.serves(6)


def test_ranks_without_an_engine_bring_their_parts_of_the_experts(moe: Served) -> None:
    """A trainer's ranks, PP2 x EP2, and one engine: a new set of workers, so this is the last update of this engine."""
    moe.version = max(moe.version, 6) + 1  # versions up to 6 are of the tests above
    assert check(run_ranks(4, update_from_parts, *moe.args, moe.version)) == [moe.version] * 4
    moe.serves(moe.version)
