"""The two engines of vLLM as a replica sees them: LLM, which is called, and AsyncLLM, which runs in an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar
from uuid import uuid4

T = TypeVar("T")


class Engine(Protocol):
    """What a replica needs of its engine. Calls block, and may raise whatever vLLM does."""

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """A method of the workers' extension, on all of them."""
        ...

    def break_off(self) -> None:
        """End requests that run."""
        ...

    def pause(self) -> None:
        """Schedule nothing: what bypasses the gate is queued."""
        ...

    def forget(self) -> None:
        """Reset prefix, multi-modal and encoder caches."""
        ...

    def resume(self, version: int) -> None:
        """Schedule again; outputs carry the version."""
        ...

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The tokens that follow."""
        ...

    def shutdown(self) -> None:
        """End the engine's processes."""
        ...


class Offline:
    """`vllm.LLM`, which must not be called by two threads at once: that ends the process.

    So requests are not broken off while they run, and close='abort' waits for them too.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._one = threading.Lock()

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Through the engine's process."""
        with self._one:
            answers: list[Any] = self.llm.collective_rpc(method, args=args)
        return answers

    def break_off(self) -> None:
        """Cannot be done."""

    def pause(self) -> None:
        """Level 0 stops the scheduler and touches no memory."""
        with self._one:
            self.llm.sleep(level=0, mode="keep")

    def forget(self) -> None:
        """All three; the prefix cache says whether it could."""
        with self._one:
            if not self.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
                raise RuntimeError("vLLM could not reset its prefix cache")
            self.llm.reset_mm_cache()
            self.llm.llm_engine.engine_core.reset_encoder_cache()

    def resume(self, version: int) -> None:
        """Back from level 0."""
        with self._one:
            self.llm.llm_engine.engine_core.set_weight_version(str(version))
            self.llm.wake_up(tags=["scheduling"])

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """As a request of its own."""
        with self._one:
            made = self.llm.generate([{"prompt_token_ids": list(prompt)}], _greedy(num_tokens), use_tqdm=False)
        return list(made[0].outputs[0].token_ids)

    def shutdown(self) -> None:
        """Processes that do not end within five seconds are killed by vLLM."""
        self.llm.llm_engine.engine_core.shutdown()


class Online:
    """`vllm.v1.engine.async_llm.AsyncLLM`, in the loop that runs it; the replica calls from other threads."""

    def __init__(self, llm: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.llm, self.loop = llm, loop

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Through the engine's process."""
        return self._run(self.llm.collective_rpc(method, args=args))

    def break_off(self) -> None:
        """They end with what they have; vLLM gives abort as their reason."""
        self._run(self.llm.pause_generation(mode="abort", clear_cache=False))

    def pause(self) -> None:
        """Requests that came past the gate keep their place and start again later."""
        self._run(self.llm.pause_generation(mode="keep", clear_cache=False))

    def forget(self) -> None:
        """All three; the prefix cache says whether it could."""
        if not self._run(self.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)):
            raise RuntimeError("vLLM could not reset its prefix cache")
        self._run(self.llm.reset_mm_cache())
        self._run(self.llm.reset_encoder_cache())

    def resume(self, version: int) -> None:
        """Outputs name the version from here on."""
        self._run(self.llm.update_weight_version(str(version)))
        self._run(self.llm.resume_generation())

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """As a request of its own."""
        return self._run(self._greedy(prompt, num_tokens))

    async def _greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        tokens: list[int] = []
        request = {"prompt_token_ids": list(prompt)}
        async for made in self.llm.generate(request, _greedy(num_tokens), f"treadle-canary-{uuid4().hex}"):
            tokens = list(made.outputs[0].token_ids)
        return tokens

    def shutdown(self) -> None:
        """Processes that do not end within five seconds are killed by vLLM."""
        self.llm.shutdown()


def _greedy(num_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def within(deadline_s: float, what: str, call: Callable[[], T]) -> T:
    """A call to vLLM, which waits for its processes without end; one that takes longer is left behind."""
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
