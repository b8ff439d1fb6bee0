"""verl's registry, manager and workers with Treadle as checkpoint engine: two actors into two rollouts, on the CPU.

`.ci/verl` runs these with a verl in an environment of its own. Ray, the manager, the worker groups and the rollouts'
workers are verl's; the engines are transformers', and replicas only note what the manager calls.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed here; .ci/verl runs these tests where it is", allow_module_level=True)

import ray
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig

from tests.support.update.verl import Actor, Rollout, make_model, right_tokens

FAILS = 4
"""The step that actor 1 cannot send."""


class Replica:
    """A replica of one rollout. It notes the manager's calls."""

    def __init__(self, worker: Any) -> None:
        self.workers = [worker]
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def call(**kwargs: Any) -> None:
            self.calls.append(name)

        return call


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> CheckpointEngineConfig:
    directory = tmp_path_factory.mktemp("verl")
    make_model(0).bfloat16().save_pretrained(directory / "model")
    kwargs = {"directory": str(directory / "s"), "ledger": str(directory / "l"), "checkpoint": str(directory / "model")}
    return CheckpointEngineConfig(
        backend="treadle",
        update_weights_bucket_megabytes=1,
        engine_kwargs={"treadle": kwargs},
        custom_backend_module="treadle.update.adapters.verl",
    )


def test_verl_finds_the_backend_by_the_name_of_its_module(config: CheckpointEngineConfig) -> None:
    import_external_libs(config.custom_backend_module)
    engine = CheckpointEngineRegistry.get("treadle")
    assert engine.__name__ == "TreadleCheckpointEngine"
    assert engine.wire_format == "named_tensors"


def test_connections_are_kept_only_where_all_have_the_same() -> None:
    topology = CheckpointEngineRegistry.get("treadle").build_topology

    def prepared(*rounds: str | None) -> list[dict[str, Any]]:
        return [{"address": "10.0.0.1", "port": 7, "round": each} for each in rounds]

    actors, rollouts = topology(1, 2, prepared(None, None, None))
    assert actors["rank"] + rollouts["rank"] == [0, 1, 2]
    (number,) = {*actors["number"], *rollouts["number"]}
    assert topology(1, 2, prepared(number, number, number))[0]["number"] == [number]
    for other in (prepared(number, number, None), prepared(number, number, "3 other")):
        assert topology(1, 2, other)[0]["number"] != [number]
    assert topology(1, 1, prepared(number, number))[0]["number"] != [number]


@pytest.fixture(scope="module")
def groups(config: CheckpointEngineConfig) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup]]:
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    try:
        actors = RayClassWithInitArgs(ray.remote(Actor), config=config, fail=FAILS)
        rollouts = RayClassWithInitArgs(
            ray.remote(Rollout), rollout_config=SimpleNamespace(checkpoint_engine=config, name="vllm")
        )
        made = [
            RayWorkerGroup(RayResourcePool([2], use_gpu=False, max_colocate_count=1), each, device_name="cpu")
            for each in (actors, rollouts)
        ]
        yield made[0], made[1]
    finally:
        ray.shutdown()


def test_both_rollouts_get_each_version_and_a_failed_one_is_not_begun(
    config: CheckpointEngineConfig, groups: tuple[RayWorkerGroup, RayWorkerGroup]
) -> None:
    actors, rollouts = groups
    replicas = [Replica(worker) for worker in rollouts.workers]
    manager = CheckpointEngineManager(config, actors, replicas)

    def update(step: int) -> Any:
        for replica in replicas:
            replica.calls.clear()
        return asyncio.run(_update(manager, step))

    whole = ["abort_all_requests", "release_kv_cache", "resume_kv_cache", "resume_generation"]
    for loads, step in ((1, 2), (2, 3)):  # the second over the connections of the first
        metrics = update(step)
        assert metrics["treadle/version"] == step
        assert rollouts.look() == [(right_tokens(step), loads)] * 2
        assert [replica.calls for replica in replicas] == [whole, whole]
    with pytest.raises(ray.exceptions.RayTaskError, match=r"trouble in the actor|update rank 1"):
        update(FAILS)
    assert [replica.calls for replica in replicas] == [whole[:2], whole[:2]], "verl leaves its replicas aborted"
    assert rollouts.look() == [(right_tokens(3), 2)] * 2, "no engine has begun to load"
    assert update(5)["treadle/version"] == 5
    assert rollouts.look() == [(right_tokens(5), 3)] * 2


async def _update(manager: CheckpointEngineManager, step: int) -> Any:
    return await manager.update_weights(global_steps=step)
