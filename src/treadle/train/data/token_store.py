"""The token store: documents tokenised once, in files that all ranks of a host map into memory.

    <cache>/<key>/training.bin          tokens, each document followed by the token that ends it
                  training.starts.npy   where documents start
                  held_out.bin, held_out.starts.npy
                  store.json            the vocabulary, and digests of the four files
            digests.json                digests of text and stores, by size, times and inode

The key is a digest of the files' contents and of all that tokens depend on, so a store is never stale. The first rank
that holds the lock makes it under another name and renames it; the others wait for the lock and find it. So it is with
digests: a file is read again where its size, its times or its inode are not those it was read with. The files of a
store are on the disk before it gets its name; one whose files have other digests than store.json is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from treadle.train.checkpoint.on_disk import sync
from treadle.train.data.documents import find_files, read_documents
from treadle.train.data.packing import PackedTokens
from treadle.train.data.tokenizing import TextTokenizer

FORM = "1"
"""Part of the key: a change of the files' form makes a new store."""

_AT_ONCE = 256
"""Documents that a tokenizer gets at once."""

SETTLED_NS = 2_000_000_000
"""The digest of a file that was written to later than this before it was read is not kept: a file system's clock is
coarse, so the file could change again and have the same times."""


@dataclass(frozen=True)
class TokenStore:
    """A store that is there. `directory` has its files."""

    directory: Path
    vocab_size: int
    dtype: str
    digest: str
    """Of the four files: equal on ranks that train on the same tokens."""

    @property
    def key(self) -> str:
        """A digest of the text and of all that its tokens depend on."""
        return self.directory.name

    def training(self, seq_len: int) -> PackedTokens:
        """Return the documents to train on, in samples of `seq_len` tokens."""
        return self._packed("training", seq_len)

    def held_out(self, seq_len: int) -> PackedTokens:
        """Return the documents that are held out, in samples of `seq_len` tokens."""
        return self._packed("held_out", seq_len)

    def _packed(self, part: str, seq_len: int) -> PackedTokens:
        path = self.directory / f"{part}.bin"
        empty = path.stat().st_size == 0  # which memmap refuses
        tokens = np.zeros(0, self.dtype) if empty else np.memmap(path, self.dtype, "r")
        return PackedTokens(tokens, np.load(self.directory / f"{part}.starts.npy"), seq_len)


def open_tokens(
    paths: Sequence[str], tokenizer: TextTokenizer, cache: Path, *, field: str = "text", held_out: float = 0.0
) -> TokenStore:
    """Return the store of some files' tokens; make it where it is not there. Any number of processes may ask at once.

    Args:
        paths: files and patterns, or "stdlib".
        tokenizer: turns documents into tokens.
        cache: the directory that has stores.
        field: the text's field in .jsonl files.
        held_out: the share of documents to hold out, chosen by a digest of each, whatever other documents there are.

    Raises:
        ValueError: a path names no file, a .jsonl line has no text under `field`, or a store's files were changed.

    """
    files = find_files(paths)
    cache.mkdir(parents=True, exist_ok=True)
    key = _key(files, tokenizer, field, held_out, cache)
    directory = cache / key
    with _locked(cache / f"{key}.lock"):
        about = _about(directory)
        if about is None:
            part = cache / f"{key}.part"
            shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
            part.mkdir()
            _write(part, files, tokenizer, field, held_out)
            shutil.rmtree(directory, ignore_errors=True)  # one without digests
            part.rename(directory)
            sync(cache)
            about = json.loads((directory / "store.json").read_text())
    _refuse_changed(directory, about["sha256"], cache)
    digest = hashlib.sha256(json.dumps(about["sha256"], sort_keys=True).encode()).hexdigest()[:24]
    return TokenStore(directory, about["vocab_size"], about["dtype"], digest)


def _about(directory: Path) -> dict[str, Any] | None:
    """Return the store.json of a store; None where there is none with digests."""
    try:
        about: dict[str, Any] = json.loads((directory / "store.json").read_text())
    except (OSError, ValueError):  # there is none, or it is damaged
        return None
    return about if "sha256" in about else None


def _refuse_changed(directory: Path, digests: Mapping[str, str], cache: Path) -> None:
    """Refuse a store with a file that is not the one that was written."""
    paths = [directory / name for name in digests]
    odd = [path for path in paths if not path.is_file()]
    if not odd:
        with _locked(cache / "digests.lock"):
            found = _digests(paths, cache / "digests.json")
        odd = [path for path, digest in zip(paths, found, strict=True) if digest != digests[path.name]]
    if odd:
        raise ValueError(
            f"data.cache: {odd[0]} is missing or was changed since it was written; remove {directory}, and the "
            "next run makes it again"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it where a process is killed
        yield


def _key(files: Sequence[Path], tokenizer: TextTokenizer, field: str, held_out: float, cache: Path) -> str:
    digest = hashlib.sha256(f"{FORM} {tokenizer.identity} {field!r} {held_out!r}".encode())
    with _locked(cache / "digests.lock"):
        for path, of_file in zip(files, _digests(files, cache / "digests.json"), strict=True):
            digest.update(f"{path.suffix} ".encode() + bytes.fromhex(of_file))
    return digest.hexdigest()[:24]


def _digests(files: Sequence[Path], kept_in: Path) -> list[str]:
    """Return a digest of each file's content; those in `kept_in` of files that were not written to since."""
    try:
        known: dict[str, list[Any]] = json.loads(kept_in.read_text())
    except (OSError, ValueError):  # there is none, or it is damaged
        known = {}
    found, kept = [], dict(known)
    for path in files:
        name, before = str(path.resolve()), _identity(path)
        if known.get(name, [])[1:] == before:
            found.append(known[name][0])
            continue
        began_ns = time.time_ns()
        found.append(_digest(path))
        _, mtime_ns, ctime_ns, _ = before
        if before == _identity(path) and max(mtime_ns, ctime_ns) < began_ns - SETTLED_NS:
            kept[name] = [found[-1], *before]
    if kept != known:
        part = kept_in.with_suffix(".part")
        part.write_text(json.dumps(kept))
        part.rename(kept_in)
    return found


def _identity(path: Path) -> list[int]:
    """Return what changes with every write to a file: ctime does even where mtime is set back."""
    now = path.stat()
    return [now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino]


def _write(directory: Path, files: Sequence[Path], tokenizer: TextTokenizer, field: str, held_out: float) -> None:
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    documents = chain.from_iterable(read_documents(path, field) for path in files)
    with _PartWriter(directory, "training", dtype) as training, _PartWriter(directory, "held_out", dtype) as held:
        for some in _batched(documents, _AT_ONCE):
            for document, tokens in zip(some, tokenizer.encode(some), strict=True):
                (held if _is_held_out(document, held_out) else training).add(tokens, tokenizer.end)
    digests = {path.name: _synced(path) for path in sorted(directory.iterdir())}
    about = {"vocab_size": tokenizer.vocab_size, "dtype": dtype, "sha256": digests}
    (directory / "store.json").write_text(json.dumps(about))
    sync(directory / "store.json")
    sync(directory)


def _synced(path: Path) -> str:
    """Bring a file to the disk; return its digest."""
    sync(path)
    return _digest(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _batched(documents: Iterator[bytes], size: int) -> Iterator[tuple[bytes, ...]]:
    while some := tuple(document for _, document in zip(range(size), documents, strict=False)):
        yield some


def _is_held_out(document: bytes, share: float) -> bool:
    number = int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "big")
    return number < share * 2.0**64


class _PartWriter:
    """Writes the documents of one part of a store."""

    def __init__(self, directory: Path, name: str, dtype: str) -> None:
        self._path, self._starts_path, self._dtype = directory / f"{name}.bin", directory / f"{name}.starts.npy", dtype
        self._starts: list[int] = []
        self._size = 0

    def __enter__(self) -> _PartWriter:
        self._file: IO[bytes] = self._path.open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        np.save(self._starts_path, np.array(self._starts, np.int64))

    def add(self, tokens: NDArray[Any], end: int) -> None:
        self._file.write(np.append(tokens, end).astype(self._dtype).tobytes())
        self._starts.append(self._size)
        self._size += len(tokens) + 1
