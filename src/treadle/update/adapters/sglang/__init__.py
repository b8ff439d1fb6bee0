"""SGLang: a process beside a server takes updates for it, by the server's HTTP calls and checkpoint-engine's sockets.

    engine = SGLang("http://127.0.0.1:30000", Path("model"), gpu_buffers(range(4), 1 << 30), directory)
    with Endpoint(engine, directory, worker=0):
        ...

Written from SGLang 0.5.23's and checkpoint-engine 0.4.2's source. Not run with SGLang itself.
"""

from treadle.update.adapters.sglang.ipc_session import EngineBuffer, gpu_buffers
from treadle.update.adapters.sglang.sglang_adapter import SGLang

__all__ = ["EngineBuffer", "SGLang", "gpu_buffers"]
