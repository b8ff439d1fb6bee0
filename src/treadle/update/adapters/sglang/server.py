"""The calls to an SGLang server that an update makes."""

from __future__ import annotations

import json
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

_OPENER = build_opener(ProxyHandler({}))  # a server of this host is not reached by a proxy


class ServerError(RuntimeError):
    """A call failed; the message has the server's reason."""


class Server:
    """One SGLang server, by its URL."""

    def __init__(self, url: str, api_key: str | None, deadline_s: float) -> None:
        self.url, self._deadline_s = url.rstrip("/"), deadline_s
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def pause(self) -> None:
        """Break requests off, and let none in."""
        self._post("pause_generation", {"mode": "abort"})

    def resume(self) -> None:
        """Let requests in again."""
        self._post("continue_generation", {})

    def flush_cache(self) -> None:
        """Drop keys and values of other weights."""
        self._post("flush_cache", {})

    def checksum(self) -> str:
        """Return a digest of the weights as the engine holds them; empty where it has none."""
        made = self._post("weights_checker", {"action": "checksum"}).get("per_engine_checksum")
        return str(made) if made is not None else ""

    def update_from_ipc(self, handles: dict[str, str]) -> None:
        """Have all ranks of the server read weights from these sockets; returns when they have ended."""
        self._post("update_weights_from_ipc", {"zmq_handles": handles, "flush_cache": True})

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = Request(f"{self.url}/{path}", json.dumps(body).encode(), self._headers)
        try:
            with _OPENER.open(request, timeout=self._deadline_s) as answer:
                text = answer.read()
        except HTTPError as error:
            raise ServerError(f"{path}: {error.code}: {_message(error.read())}") from error
        except (URLError, TimeoutError, OSError) as error:
            raise ServerError(f"{path}: {self.url} does not answer: {error}") from error
        content = _parsed(text)
        if content.get("success") is False:
            raise ServerError(f"{path}: {content.get('message')}")
        return content


def _parsed(text: bytes) -> dict[str, Any]:
    """Return the object that an answer is; some answers are plain text."""
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _message(text: bytes) -> str:
    return str(_parsed(text).get("message", text.decode(errors="replace")[:500]))
