"""vLLM: a worker extension that takes updates in vLLM's workers, and a gate in front of the engine.

    llm = LLM(model, worker_extension_cls="treadle.update.adapters.vllm.Extension", ...)
    with Replica(Offline(llm), directory) as replica:
        with replica.serving() as version:
            llm.generate(...)

Each worker of the engine has an endpoint in `directory`, beside which an update rank runs. The gate is in the process
that has the engine; it is open while all workers of the engine serve one version.
"""

from treadle.update.adapters.vllm.engines import Offline, Online
from treadle.update.adapters.vllm.extension import Extension
from treadle.update.adapters.vllm.replica import Canary, Replica

__all__ = ["Canary", "Extension", "Offline", "Online", "Replica"]
