"""Documents become tokens once, in files keyed by content."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import multiprocessing as mp
import os
import re
import shutil
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from treadle.train.data import open_tokens, token_store
from treadle.train.data.documents import find_files, read_documents
from treadle.train.data.tokenizing import ByteTokenizer, Tokens, make_tokenizer

STDLIB = Path(sysconfig.get_paths()["stdlib"])
SOURCES = [str(STDLIB / name) for name in ("bisect.py", "heapq.py", "queue.py", "this.py", "abc.py", "stat.py")]


def test_bytes_of_sources_are_the_tokens_and_documents_end(tmp_path: Path) -> None:
    packed = open_tokens(SOURCES, ByteTokenizer(), tmp_path).training(64)
    texts = [Path(path).read_bytes() for path in sorted(SOURCES)]
    ends = [*packed.starts[1:].tolist(), len(packed.tokens)]
    got = [packed.tokens[start:end] for start, end in zip(packed.starts.tolist(), ends, strict=True)]
    assert [bytes(part[:-1].astype(np.uint8)) for part in got] == texts
    assert {int(part[-1]) for part in got} == {256}


def test_held_out_documents_are_apart_whatever_else_there_is(tmp_path: Path) -> None:
    def held(paths: list[str]) -> set[bytes]:
        store = open_tokens(paths, ByteTokenizer(), tmp_path, held_out=0.4)
        parts = [store.held_out(8), store.training(8)]
        sets = [{bytes(doc.astype(np.uint8)) for doc in np.split(p.tokens, p.starts[1:])} for p in parts]
        assert not sets[0] & sets[1]
        assert len(sets[0]) + len(sets[1]) == len(paths)
        return sets[0]

    both = held(SOURCES)
    assert 0 < len(both) < len(SOURCES)
    assert held(SOURCES[:4]) <= both


def test_a_changed_file_makes_a_new_store_and_the_same_text_none(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one")
    stores = [open_tokens([str(text)], ByteTokenizer(), tmp_path / "cache") for _ in range(2)]
    text.write_text("two")
    stores.append(open_tokens([str(text)], ByteTokenizer(), tmp_path / "cache"))
    assert stores[0] == stores[1] != stores[2]
    assert bytes(stores[2].training(1).tokens[:3].astype(np.uint8)) == b"two"


def test_a_store_cut_off_in_mid_write_is_made_again(tmp_path: Path) -> None:
    whole = open_tokens(SOURCES, ByteTokenizer(), tmp_path / "a")
    part = tmp_path / "b" / f"{whole.directory.name}.part"
    part.mkdir(parents=True)
    (part / "training.bin").write_bytes(b"cut off")
    again = open_tokens(SOURCES, ByteTokenizer(), tmp_path / "b")
    assert np.array_equal(again.training(8).tokens, whole.training(8).tokens)


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 9 // 10)


def zeros_at_the_end(path: Path) -> None:
    content = path.read_bytes()
    kept = len(content) * 9 // 10
    path.write_bytes(content[:kept] + bytes(len(content) - kept))


@pytest.mark.parametrize("file", ["training.bin", "training.starts.npy", "held_out.bin", "held_out.starts.npy"])
@pytest.mark.parametrize("damage", [cut_off, zeros_at_the_end, Path.unlink])
def test_a_store_with_a_changed_file_is_refused(damage: Callable[[Path], None], file: str, tmp_path: Path) -> None:
    store = open_tokens(SOURCES, ByteTokenizer(), tmp_path, held_out=0.4)
    damage(store.directory / file)
    told = f"{file} is missing or was changed since it was written; remove {store.directory}, and the next run makes it"
    with pytest.raises(ValueError, match=re.escape(told)):
        open_tokens(SOURCES, ByteTokenizer(), tmp_path, held_out=0.4)
    shutil.rmtree(store.directory)
    assert open_tokens(SOURCES, ByteTokenizer(), tmp_path, held_out=0.4) == store


def test_the_files_of_a_store_are_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    to_disk = os.fsync

    def noted(opened: int) -> None:
        synced.append(Path(f"/proc/self/fd/{opened}").readlink())
        to_disk(opened)

    monkeypatch.setattr(os, "fsync", noted)
    store = open_tokens(SOURCES, ByteTokenizer(), tmp_path)
    part = tmp_path / f"{store.key}.part"
    assert {path.name for path in store.directory.iterdir()} == {path.name for path in synced if path.parent == part}
    assert synced[-2:] == [part, tmp_path]


def test_a_store_without_digests_is_made_again(tmp_path: Path) -> None:
    store = open_tokens(SOURCES, ByteTokenizer(), tmp_path)
    (store.directory / "store.json").write_text('{"vocab_size": 257, "dtype": "uint16"}')
    cut_off(store.directory / "training.bin")
    assert open_tokens(SOURCES, ByteTokenizer(), tmp_path) == store


class CountingTokenizer(ByteTokenizer):
    calls = 0

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        CountingTokenizer.calls += 1
        return super().encode(documents)


def _open(cache: Path) -> tuple[str, int, int]:
    before = CountingTokenizer.calls
    store = open_tokens(SOURCES, CountingTokenizer(), cache)
    return store.directory.name, CountingTokenizer.calls - before, len(store.training(8).tokens)


def test_of_several_processes_one_makes_the_store_and_all_read_it(tmp_path: Path) -> None:
    with mp.get_context("fork").Pool(4) as pool:
        got = pool.map(_open, [tmp_path] * 8, chunksize=1)
    assert len({(name, size) for name, _, size in got}) == 1
    assert sum(made for _, made, _ in got) == 1


def test_a_file_is_read_for_its_digest_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, digest_of = [], hashlib.file_digest

    def counted(file: Any, name: str) -> Any:
        read.append(file.name)
        return digest_of(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    stores = [open_tokens(SOURCES, ByteTokenizer(), tmp_path) for _ in range(3)]
    assert sorted(name for name in read if name in SOURCES) == sorted(SOURCES)
    (tmp_path / "digests.json").write_text("{cut of")
    stores.append(open_tokens(SOURCES[1:], ByteTokenizer(), tmp_path))
    assert len([name for name in read if name in SOURCES]) == 2 * len(SOURCES) - 1
    assert stores[0] == stores[1] == stores[2] != stores[3]


def test_a_digest_is_not_kept_of_a_file_that_changed_in_all_but_size_and_mtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, keys = tmp_path / "a.txt", []
    for settled_ns in (0, token_store.SETTLED_NS):  # kept at once, and not kept of a file that was just written
        monkeypatch.setattr(token_store, "SETTLED_NS", settled_ns)
        for content in ("one", "two"):
            text.write_text(content)
            os.utime(text, ns=(10**18, 10**18))
            time.sleep(0.1)  # the clock of a file system is coarse
            keys.append(open_tokens([str(text)], ByteTokenizer(), tmp_path / f"{settled_ns}").key)
    assert keys[:2] == keys[2:]
    assert keys[0] != keys[1]


def test_jsonl_gives_a_document_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"body": text}) for text in ("é", "b")) + "\n\n")
    assert list(read_documents(path, "body")) == ["é".encode(), b"b"]
    with pytest.raises(ValueError, match=r"a.jsonl:1: no text under 'text', the line has body; name the field in data"):
        list(read_documents(path, "text"))


def test_a_line_that_has_no_utf_8_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a"}) + "\n" + r'{"text": "crawled \ud83d"}' + "\n")
    with pytest.raises(ValueError, match=r"a.jsonl:2: the text under 'text' has half .* '\\ud83d' at character 8, for"):
        list(read_documents(path, "text"))


@pytest.mark.parametrize(
    ("name", "content", "form"),
    [
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}'), "gzip"),
        ("a.txt.bz2", bz2.compress(b"a"), "bzip2"),
        ("a.txt.xz", lzma.compress(b"a"), "xz"),
        ("a.txt.zst", bytes.fromhex("28b52ffd2001090000") + b"a", "zstd"),
        ("a.parquet", b"PAR1" + bytes(8) + b"PAR1", "parquet"),
        ("a.png", b"\x89PNG\r\n\x1a\n" + bytes(8), "binary"),
    ],
    ids=["gzip", "bzip2", "xz", "zstd", "parquet", "png"],
)
def test_a_compressed_or_binary_file_is_refused(name: str, content: bytes, form: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} is no text but {form}; unpack or convert it, or name only"):
        open_tokens([str(tmp_path)], ByteTokenizer(), tmp_path / "cache")


def test_a_path_without_files_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'nowhere/\*.txt' names no file"):
        find_files(["nowhere/*.txt"])


def test_a_directory_stands_for_the_files_below_it(tmp_path: Path) -> None:
    below = tmp_path / "my texts" / "more"
    below.mkdir(parents=True)
    for file in (below / "b.txt", below.parent / "a.txt", below / ".hidden"):
        file.write_text("text")
    assert find_files([str(below.parent)]) == [below.parent / "a.txt", below / "b.txt"]


def test_stdlib_is_found_without_its_tests() -> None:
    files = find_files(["stdlib"])
    assert STDLIB / "argparse.py" in files
    assert not [file for file in files if {"test", "tests", "site-packages"} & set(file.relative_to(STDLIB).parts)]


def test_a_tokenizer_file_encodes_and_names_its_end(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    words.save(str(path))
    with pytest.raises(ValueError, match=r"no token any of <\|endoftext\|>.* data.end_of_document .*special tokens: n"):
        make_tokenizer(str(tmp_path))
    words.add_special_tokens(["</s>"])
    words.save(str(path))
    tokenizer = make_tokenizer(str(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.end) == (4, 3)
    assert [tokens.tolist() for tokens in tokenizer.encode([b"a b z", b"b"])] == [[0, 1, 2], [1]]
    assert make_tokenizer(str(path), "b").end == 1
