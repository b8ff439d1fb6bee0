"""vLLM's two engines behind one interface: LLM, which is called, and AsyncLLM, which runs in an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar
from uuid import uuid4

T = TypeVar("T")


class Engine(Protocol):
    """The calls that a replica makes to its engine. They block, and may raise anything that vLLM raises."""

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker extension on all workers; their answers."""
        ...

    def break_off(self) -> None:
        """End running requests early."""
        ...

    def pause(self) -> None:
        """Stop scheduling. Requests that bypass the gate are queued."""
        ...

    def forget(self) -> None:
        """Reset prefix, multi-modal and encoder caches."""
        ...

    def resume(self, version: int) -> None:
        """Schedule again; outputs carry the version."""
        ...

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return the tokens that follow a prompt at temperature 0."""
        ...

    def shutdown(self) -> None:
        """End the engine's processes."""
        ...


class Offline:
    """`vllm.LLM`. Two threads that call it at once end the process, so calls from here take a lock.

    Running requests therefore cannot be broken off: close='abort' waits for them, too.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._one = threading.Lock()

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call through the engine's process."""
        with self._one:
            answers: list[Any] = self.llm.collective_rpc(method, args=args)
        return answers

    def break_off(self) -> None:
        """Do nothing: running requests cannot be broken off."""

    def pause(self) -> None:
        """Sleep at level 0, which stops the scheduler and touches no memory."""
        with self._one:
            self.llm.sleep(level=0, mode="keep")

    def forget(self) -> None:
        """Reset the three caches. Raises RuntimeError where the prefix cache could not be."""
        with self._one:
            if not self.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
                raise RuntimeError("vLLM could not reset its prefix cache")
            self.llm.reset_mm_cache()
            self.llm.llm_engine.engine_core.reset_encoder_cache()

    def resume(self, version: int) -> None:
        """Set the version and wake the scheduler."""
        with self._one:
            self.llm.llm_engine.engine_core.set_weight_version(str(version))
            self.llm.wake_up(tags=["scheduling"])

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Generate in a request of its own."""
        with self._one:
            made = self.llm.generate([{"prompt_token_ids": list(prompt)}], _greedy(num_tokens), use_tqdm=False)
        return list(made[0].outputs[0].token_ids)

    def shutdown(self) -> None:
        """Shut down; vLLM kills processes that do not end within five seconds."""
        self.llm.llm_engine.engine_core.shutdown()


class Online:
    """`vllm.v1.engine.async_llm.AsyncLLM` in the event loop `loop`. The replica calls from other threads."""

    def __init__(self, llm: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.llm, self.loop = llm, loop

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call through the engine's process."""
        return self._run(self.llm.collective_rpc(method, args=args))

    def break_off(self) -> None:
        """End requests with the tokens they have; vLLM gives abort as their finish reason."""
        self._run(self.llm.pause_generation(mode="abort", clear_cache=False))

    def pause(self) -> None:
        """Pause generation. Requests that bypassed the gate keep their place and go on later."""
        self._run(self.llm.pause_generation(mode="keep", clear_cache=False))

    def forget(self) -> None:
        """Reset the three caches. Raises RuntimeError where the prefix cache could not be."""
        if not self._run(self.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)):
            raise RuntimeError("vLLM could not reset its prefix cache")
        self._run(self.llm.reset_mm_cache())
        self._run(self.llm.reset_encoder_cache())

    def resume(self, version: int) -> None:
        """Set the version, which outputs carry, and resume generation."""
        self._run(self.llm.update_weight_version(str(version)))
        self._run(self.llm.resume_generation())

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Generate in a request of its own."""
        return self._run(self._greedy(prompt, num_tokens))

    async def _greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        tokens: list[int] = []
        request = {"prompt_token_ids": list(prompt)}
        async for made in self.llm.generate(request, _greedy(num_tokens), f"treadle-canary-{uuid4().hex}"):
            tokens = list(made.outputs[0].token_ids)
        return tokens

    def shutdown(self) -> None:
        """Shut down; vLLM kills processes that do not end within five seconds."""
        self.llm.shutdown()


def _greedy(num_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def within(deadline_s: float, what: str, call: Callable[[], T]) -> T:
    """Call vLLM with a deadline, in a thread that is left behind after it: vLLM waits for its processes forever."""
    made: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            made.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=f"treadle {what}", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if raised:
        raise raised[0]
    if not made:
        raise TimeoutError(f"vLLM did not {what} within {deadline_s:g} s")
    return made[0]
