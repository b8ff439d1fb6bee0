"""What an exported model needs besides weights and config: the tokenizer of its text, and how to generate."""

from __future__ import annotations

import shutil
from pathlib import Path

from treadle.train.data.tokenizing import BYTES

TOKENIZER = "tokenizer.json"

_WITH_TOKENIZER = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_WITH_WEIGHTS = ("generation_config.json",)


def copy_tokenizer(tokenizer: str, weights: str, to: Path) -> None:
    """Copy the files of `data.tokenizer`, and the generation config of `checkpoint.weights`, into an exported model.

    Bytes as tokens have no file. A tokenizer that is given as a file of another name brings no further files.
    """
    if tokenizer != BYTES:
        given = Path(tokenizer)
        file = given / TOKENIZER if given.is_dir() else given
        shutil.copyfile(file, to / TOKENIZER)
        if file.name == TOKENIZER:
            _copy(_WITH_TOKENIZER, file.parent, to)
    if weights:
        _copy(_WITH_WEIGHTS, Path(weights), to)


def _copy(names: tuple[str, ...], directory: Path, to: Path) -> None:
    for name in names:
        if (directory / name).is_file():
            shutil.copyfile(directory / name, to / name)
