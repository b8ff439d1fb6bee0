"""What `pip install .` leaves out is named by whoever needs it, with a command that installs it from the index."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.patience import HUNG_S
from treadle.host.extras import BROUGHT, brought_by, install_command

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
        f"{missing}|{what} needs {missing}; install it with: pip install '{needed(extra, missing)}'"
        for what, extra in IMPORTS.values()
    ]
    assert dict(zip(IMPORTS, done.stdout.splitlines(), strict=True)) == dict(zip(IMPORTS, expected, strict=True))


def needed(extra: str, package: str) -> str:
    """The package as an extra of pyproject.toml asks for it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    (found,) = (line for line in extras[extra] if re.match(r"[\w-]+", line)[0] == package)  # type: ignore[index]
    return str(found)


def test_other_modules_that_are_missing_keep_their_own_error() -> None:
    named = pytest.raises(ModuleNotFoundError, match="No module named 'nobody_has_this'")
    with named, brought_by("run", needed_by="x"):
        import nobody_has_this  # type: ignore[import-not-found]  # noqa: F401


def test_no_message_installs_treadle_from_the_index() -> None:
    for path in sorted((ROOT / "src").rglob("*.py")):
        assert "treadle[" not in re.sub(r"treadle\[\"", "", path.read_text("utf-8")), path


@pytest.mark.parametrize("extra", ["view", "plan", "run", "update", "train"])
def test_what_an_extra_brings_is_installed_by_name(extra: str) -> None:
    """Here all of it is installed, so all of it is named."""
    program, verb, *packages = shlex.split(install_command(extra))
    assert (program, verb) == ("pip", "install")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    names = [re.split(r"[<>=]", line)[0] for line in packages]
    assert set(names) <= {re.split(r"[<>=]", line)[0] for line in extras[extra]}
    assert set(names) <= set(BROUGHT)


@pytest.mark.slow
def test_commands_without_a_package_end_with_a_sentence(tmp_path: Path) -> None:
    asked = {
        "matplotlib": "draw 1f1b --pp 2 -m 2 -o a.svg",
        "ortools": "synthesize --pp 2 -m 2",
        "torch": "dryrun 1f1b --pp 2 -m 2",
        "xxhash": "selfcheck --quick",
    }
    code = "import sys; sys.modules[sys.argv.pop(1)] = None; import treadle.cli; treadle.cli.main()"
    for missing, line in asked.items():
        command = [sys.executable, "-c", code, missing, *line.split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG_S, check=False, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        told = rf"error: .* needs {missing}; install it with: pip install '{missing}\b"
        assert re.search(told, done.stderr), done.stderr
        assert "Traceback" not in done.stderr
