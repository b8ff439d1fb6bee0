"""Tokenizers: bytes, which need no file, and those of Hugging Face's tokenizer.json."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = NDArray[np.integer[Any]]

BYTES = "bytes"

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""Names that end a document where a configuration gives none, the first that the tokenizer has."""


class TextTokenizer(Protocol):
    """Turns documents into tokens, without the one that ends a document."""

    @property
    def vocab_size(self) -> int:
        """Tokens are less than this."""
        ...

    @property
    def end(self) -> int:
        """The token that ends a document."""
        ...

    @property
    def identity(self) -> str:
        """Differs between tokenizers that may give different tokens."""
        ...

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        """Return the tokens of each document."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """Each byte is a token; 256 ends a document.

    Example:
        >>> ByteTokenizer().encode([b"ab"])[0].tolist(), ByteTokenizer().end
        ([97, 98], 256)

    """

    vocab_size: int = 257
    end: int = 256
    identity: str = BYTES

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        """Return the bytes of each document."""
        return [np.frombuffer(document, np.uint8) for document in documents]


class FileTokenizer:
    """A Hugging Face tokenizer.json."""

    def __init__(self, path: Path, end_name: str) -> None:
        from tokenizers import Tokenizer

        text = path.read_bytes()
        self._tokenizer = Tokenizer.from_buffer(text)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.end = self._end(path, end_name)
        self.identity = f"{hashlib.sha256(text).hexdigest()} {self.end}"

    def _end(self, path: Path, name: str) -> int:
        for candidate in (name,) if name else END_NAMES:
            found: int | None = self._tokenizer.token_to_id(candidate)
            if found is not None:
                return found
        special = sorted(token.content for token in self._tokenizer.get_added_tokens_decoder().values())
        wanted = repr(name) if name else f"any of {', '.join(END_NAMES)}"
        raise ValueError(
            f"{path} has no token {wanted} to end a document; name one in data.end_of_document "
            f"(its special tokens: {', '.join(special) or 'none'})"
        )

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        """Return the tokens of each document; bytes that are no UTF-8 become replacement characters."""
        texts = [document.decode(errors="replace") for document in documents]
        made = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in made]


def make_tokenizer(name: str, end_name: str = "") -> TextTokenizer:
    """Return a tokenizer.

    Args:
        name: "bytes", a tokenizer.json, or a directory with one.
        end_name: the token of a tokenizer.json that ends a document; empty for a usual one.

    Raises:
        ValueError: there is no such file, or no token to end a document.

    """
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise ValueError(f"data.tokenizer is 'bytes', a tokenizer.json or a directory with one, got {name!r}")
    return FileTokenizer(path, end_name)
