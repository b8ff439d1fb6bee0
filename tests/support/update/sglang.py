"""A stand-in for an SGLang server of two ranks, on the CPU: python -m tests.support.update.sglang PORT_FILE

Written from reading SGLang 0.5.23 and checkpoint-engine 0.4.2: the HTTP calls of an update, and what ranks say over
their sockets. It is not SGLang: it holds the rows r, r + 2, ... of each tensor on rank r, and generates nothing.
Two calls are for tests: /look says what it holds, /trouble makes a rank fail once.
"""

from __future__ import annotations

import gc
import hashlib
import json
import mmap
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import zmq

from treadle.update.adapters.sglang import EngineBuffer

NUM_RANKS = 2


def map_file(path: str, size: int, *rest: Any) -> torch.Tensor:
    """A handle's function: seven arguments, of which the engine replaces the last, as of one of CUDA."""
    assert len(rest) == 5
    with open(path, "r+b") as file:  # noqa: PTH123
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)


def host_buffers(directory: Path, size: int) -> dict[str, EngineBuffer]:
    """Buffers in files, for ranks that are on no GPU."""
    made = {}
    for rank in range(NUM_RANKS):
        path = directory / f"buffer-{rank}"
        path.write_bytes(bytes(size))
        args = (str(path), size, None, None, None, None, 0)
        made[f"GPU-{rank}"] = EngineBuffer(map_file(*args), (map_file, args))
    return made


def checksum_of(weights: dict[str, torch.Tensor]) -> str:
    """What a server has as checksum that has loaded these weights whole, on all ranks."""
    made = hashlib.sha256()
    for rank in range(NUM_RANKS):
        made.update(_digest({name: tensor[rank::NUM_RANKS] for name, tensor in weights.items()}).encode())
    return made.hexdigest()


def _digest(held: dict[str, torch.Tensor]) -> str:
    made = hashlib.sha256()
    for name in sorted(held):
        made.update(name.encode() + held[name].contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


class Rank:
    """One rank: `held` is what load_weights has copied, `processed` what the post hook has made of it."""

    def __init__(self, rank: int) -> None:
        self.rank, self.trouble = rank, ""
        self.held: dict[str, torch.Tensor] = {}
        self.processed = _digest({})

    def meets(self, what: str) -> bool:
        met = self.trouble == what
        if met:
            self.trouble = ""
        return met

    def update(self, context: zmq.Context[Any], handle: str) -> tuple[bool, str]:
        socket = context.socket(zmq.REP)
        socket.connect(handle)
        try:
            self._converse(socket)
        except Exception as error:
            return False, str(error)
        finally:
            socket.close()
        return True, "done"

    def _converse(self, socket: zmq.Socket[bytes]) -> None:
        try:
            function, args = socket.recv_pyobj()
            if self.meets("map"):
                raise RuntimeError("trouble in map")
            buffer = function(*args[:6], 0)
        except Exception:
            socket.send_string(traceback.format_exc())
            socket.recv()
            raise
        socket.send(b"")
        while (message := socket.recv_pyobj()) is not None:
            if isinstance(message, Exception):
                raise message
            try:
                for each in message:
                    size = each["dtype"].itemsize * each["shape"].numel()
                    tensor = buffer[each["offset"] : each["offset"] + size].view(each["dtype"]).view(each["shape"])
                    if self.meets("load"):
                        raise RuntimeError("trouble in load")
                    self.held[each["name"]] = tensor[self.rank :: NUM_RANKS].clone()
                socket.send(b"")
            except Exception:
                socket.send_string(traceback.format_exc())
        del buffer
        gc.collect()
        socket.send(b"")
        assert socket.recv_pyobj() is None
        if not self.meets("post hook"):  # SGLang logs a hook's failure and goes on
            self.processed = _digest(self.held)
        socket.send(b"")


class Server:
    def __init__(self) -> None:
        self.ranks = [Rank(rank) for rank in range(NUM_RANKS)]
        self.context = zmq.Context()
        self.is_paused = False
        self.calls: list[str] = []

    def pause_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["mode"] in ("abort", "retract", "in_place")
        self.is_paused = True
        return {"message": "paused"}

    def continue_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        self.is_paused = False
        return {"message": "continues"}

    def flush_cache(self, body: dict[str, Any]) -> dict[str, Any]:
        return {}

    def weights_checker(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["action"] == "checksum"
        made = hashlib.sha256("".join(rank.processed for rank in self.ranks).encode())
        return {"success": True, "message": "", "per_engine_checksum": made.hexdigest()}

    def update_weights_from_ipc(self, body: dict[str, Any]) -> dict[str, Any]:
        handles = body["zmq_handles"]
        with ThreadPoolExecutor(NUM_RANKS) as pool:
            ends = list(pool.map(lambda rank: rank.update(self.context, handles[f"GPU-{rank.rank}"]), self.ranks))
        failed = [text for done, text in ends if not done]
        return {"success": not failed, "message": "; ".join(failed)}

    def look(self, body: dict[str, Any]) -> dict[str, Any]:
        calls, self.calls = self.calls, []
        return {
            "paused": self.is_paused,
            "calls": [c for c in calls if c != "look"],
            **self.weights_checker({"action": "checksum"}),
        }

    def trouble(self, body: dict[str, Any]) -> dict[str, Any]:
        self.ranks[body["rank"]].trouble = body["what"]
        return {}


def main() -> None:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            call = self.path.strip("/")
            server.calls.append(call)
            answer = getattr(server, call)(body)
            self.send_response(400 if answer.get("success") is False else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port = Path(sys.argv[1])
    port.with_suffix(".part").write_text(str(http.server_port))
    port.with_suffix(".part").rename(port)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    sys.stdin.read()  # until the test closes it


if __name__ == "__main__":
    main()
