"""What `pip install .` leaves out: an error names the command that brings it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

BROUGHT = (
    *("torch", "msgspec", "xxhash", "safetensors", "ortools", "pyyaml", "matplotlib"),
    *("tensorboard", "tokenizers", "torchdata", "transformers", "tyro"),
)
"""The packages that extras bring."""

_IMPORTED = {"pyyaml": "yaml"}
"""Modules whose names are not those of their packages."""

_OF_EXTRA = re.compile(r"""(?P<package>([\w-]+)[^;\s]*)\s*;\s*extra\s*==\s*['"](?P<extra>\w+)['"]""")


def install_command(*extras: str) -> str:
    """Return the command that installs what these extras bring and is not there.

    It names packages, and no extra of Treadle, which is not on the package index.
    """
    from importlib.metadata import PackageNotFoundError, requires
    from importlib.util import find_spec

    try:
        lines = [_OF_EXTRA.fullmatch(line) for line in requires("treadle") or ()]
    except PackageNotFoundError:  # run from its sources
        return f"pip install '.[{','.join(extras)}]' in a checkout of Treadle"
    wanted = {found[2]: found["package"] for found in lines if found is not None and found["extra"] in extras}
    lacking = [f"'{package}'" for name, package in wanted.items() if find_spec(_IMPORTED.get(name, name)) is None]
    return " ".join(["pip install", *(lacking or (f"'{package}'" for package in wanted.values()))])


class MissingPackageError(ModuleNotFoundError, ValueError):
    """A package that an extra brings is not there; the message has the command that installs it."""


@contextmanager
def brought_by(*extras: str, needed_by: str) -> Iterator[None]:
    """Turn the failed import of such a package into one that names how to install it.

    Raises:
        MissingPackageError: it is not there.

    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in {_IMPORTED.get(name, name) for name in BROUGHT}:
            raise
        text = f"{needed_by} needs {missing}; install it with: {install_command(*extras)}"
        raise MissingPackageError(text, name=missing) from None
