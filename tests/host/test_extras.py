"""Imports of what `pip install treadle` leaves out name the extra that brings it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.patience import HUNG_S
from treadle.host.extras import brought_by

IMPORTS = {
    "import treadle.update": ("treadle.update", "update"),
    "from treadle.update import Endpoint": ("treadle.update", "update"),
    "from treadle.update import Updater": ("treadle.update", "update"),
    "import treadle.update.worker.endpoint": ("treadle.update", "update"),
    "import treadle; treadle.update": ("treadle.update", "update"),
    "import treadle.moe": ("treadle.moe", "run"),
    "from treadle.moe import MoELayer": ("treadle.moe", "run"),
    "import treadle.runtime": ("treadle.runtime", "run"),
    "from treadle.runtime import Pipeline": ("treadle.runtime", "run"),
    "from treadle import Pipeline": ("treadle.Pipeline", "run"),
}

TRY = """
import sys
missing, *lines = sys.argv[1:]
sys.modules[missing] = None
for line in lines:
    try:
        exec(line)
    except ImportError as error:
        print(error.name, error, sep="|")
    else:
        print("imported")
"""


@pytest.mark.parametrize("missing", ["torch", "msgspec"])
def test_an_import_without_its_extra_names_it(missing: str) -> None:
    command = [sys.executable, "-c", TRY, missing, *IMPORTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG_S, check=True)
    expected = [
        f"{missing}|{what} needs {missing}; install it with: pip install 'treadle[{extra}]'"
        for what, extra in IMPORTS.values()
    ]
    assert dict(zip(IMPORTS, done.stdout.splitlines(), strict=True)) == dict(zip(IMPORTS, expected, strict=True))


def test_other_modules_that_are_missing_keep_their_own_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'nobody_has_this'"), brought_by("run", "x"):
        import nobody_has_this  # type: ignore[import-not-found]  # noqa: F401
