"""What `pytest --since` leaves out cannot be affected; what it cannot follow it does not leave out."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.since import Graph, Since, module_of, read

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def graph() -> Graph:
    return Graph()


@pytest.mark.parametrize(
    "file", ["verifier/test_mutations.py", "profiles/test_torch_pipelining.py", "cli/test_plan.py", "test_doors.py"]
)
def test_what_a_test_file_loads_is_in_its_closure(file: str, graph: Graph) -> None:
    module = module_of((ROOT / "tests" / file).relative_to(ROOT))
    loads = f"import json, sys, {module}; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", loads], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name for name in json.loads(done.stdout.splitlines()[-1]) if name in graph.paths}
    assert len(loaded) > 5
    assert loaded <= graph.closure(module) | {"treadle", "tests"}


def test_a_change_chooses_the_tests_that_import_it(graph: Graph) -> None:
    chosen = graph.affected(["src/treadle/verifier/waits.py"])
    assert chosen is not None
    assert {"tests/verifier/test_mutations.py", "tests/cli/test_plan.py", "tests/test_house.py"} <= chosen
    assert "tests/wire/test_wire.py" in chosen, "it looks at every source"
    of_locks = graph.affected(["src/treadle/train/checkpoint/lock.py"])
    assert of_locks is not None
    assert "tests/train/checkpoint/test_needs.py" in of_locks
    assert not {"tests/verifier/test_mutations.py", "tests/host/test_errors.py", "tests/ir/test_blocks.py"} & of_locks
    assert graph.affected(["tests/wire/test_wire.py"]) is not None


def test_names_that_a_package_imports_late_and_names_in_strings_count(graph: Graph) -> None:
    assert "treadle.runtime" in graph.closure("tests.runtime.test_pipeline")
    assert "treadle.cli.commands.hang" in graph.closure("tests.cli.test_plan"), "the command line finds it by its name"
    assert "examples.rl_loop" in graph.closure("tests.docs.test_rl_loop")
    assert read("if TYPE_CHECKING:\n    import treadle.ir\n").imports == set()


@pytest.mark.parametrize(
    "changed", ["pyproject.toml", "tests/conftest.py", "tests/golden/none.txt", "src/treadle/gone.py", ".ci/run"]
)
def test_what_cannot_be_followed_chooses_all(changed: str, graph: Graph) -> None:
    assert graph.affected([changed, "src/treadle/verifier/waits.py"]) is None


def test_a_page_chooses_the_tests_that_read_pages(graph: Graph) -> None:
    chosen = graph.affected(["docs/plan.md"])
    assert chosen is not None
    assert {"tests/docs/test_pages.py", "tests/estimate/test_held_to.py", "tests/test_rooms.py"} <= chosen
    assert "tests/ir/test_blocks.py" not in chosen


def test_files_are_left_out_before_they_are_imported() -> None:
    since = Since("HEAD", ["tests/ir/test_blocks.py"])
    assert since.pytest_ignore_collect(ROOT / "tests" / "ir" / "test_ops.py") is True
    assert since.pytest_ignore_collect(ROOT / "tests" / "ir" / "test_blocks.py") is None
    assert since.pytest_ignore_collect(ROOT / "tests" / "ir") is None
