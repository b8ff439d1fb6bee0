"""The files of a Hugging Face checkpoint: which of them has which tensor."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"


def files_of(directory: str | Path) -> dict[str, Path]:
    """Return the file of each tensor by the tensor's name.

    Raises:
        ValueError: the directory has no safetensors.

    """
    directory = Path(directory)
    if (directory / WHOLE).is_file():
        with safe_open(directory / WHOLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), directory / WHOLE)
    if (directory / INDEX).is_file():
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        return {name: directory / file for name, file in index["weight_map"].items()}
    raise ValueError(
        f"{directory} has neither {WHOLE} nor {INDEX}; save the model as safetensors (save_pretrained of transformers "
        "does)"
    )
