"""`treadle.draw`, and what notebooks show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import treadle
from treadle.drawing import Picture
from treadle.passes.cells import lower_cells
from treadle.weights.bucket_stream import even_stream
from treadle.weights.buffer_sizes import Memory
from treadle.weights.layouts import replicated
from treadle.weights.tensor_boxes import Tensor
from treadle.weights.update_lowering import lower_update
from treadle.weights.update_plan import UpdatePlan, plan_update

UNIT = treadle.load_costs("unit")
SCHEDULE = treadle.generate("zb-h1", pp=2, microbatches=4)
PROGRAM = treadle.lower(SCHEDULE, UNIT)
HANGS = treadle.loads("0: F0.0 B0.0 F1.0 B1.0\n1: F0.0 F1.0 B0.0 B1.0\n")


def update_plan() -> UpdatePlan:
    tensors = [Tensor(f"w{i}", (256, 256), "float32") for i in range(8)]
    return plan_update(replicated(tensors, 2), replicated(tensors, 2), Memory(1 << 30, target_bytes=1 << 20))


SHOWN: dict[str, Any] = {
    "schedule": SCHEDULE,
    "program": PROGRAM,
    "layers": treadle.lower(SCHEDULE, UNIT, treadle.LoweringOptions(layers=1, moe=True)),
    "trace": treadle.simulate(PROGRAM, UNIT),
    "update": lower_update(even_stream(2, 2)),
    "plan": update_plan(),
    "hangs": HANGS,
    "program that hangs": lower_cells(HANGS),
}


@pytest.mark.parametrize("name", SHOWN)
def test_everything_is_drawn_and_shows_itself(name: str, tmp_path: Path) -> None:
    form = (".svg", ".png", ".pdf")[list(SHOWN).index(name) % 3]  # test_figures.py has one trace in every form
    path = treadle.draw(SHOWN[name], tmp_path / f"a{form}", width="column")
    assert path == tmp_path / f"a{form}"
    assert (tmp_path / f"a{form}").stat().st_size > 1000
    picture = treadle.draw(SHOWN[name])
    assert isinstance(picture, Picture)
    assert picture.svg.startswith("<svg ")
    assert SHOWN[name]._repr_html_() == picture._repr_html_()


def test_several_are_drawn_on_one_axis(tmp_path: Path) -> None:
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    treadle.draw(SCHEDULE, one, memory=True)
    treadle.draw([SCHEDULE, SHOWN["trace"], HANGS], two, names=["a", "b", "c"])
    assert two.stat().st_size > one.stat().st_size
    with pytest.raises(ValueError, match="a figure of its own, got 2 traces"):
        treadle.draw([SHOWN["update"], SHOWN["update"]])


def test_pages(tmp_path: Path) -> None:
    treadle.draw(SCHEDULE, tmp_path / "a.html", title="mine")
    assert "<title>mine</title>" in (tmp_path / "a.html").read_text()
    treadle.draw([SCHEDULE, PROGRAM], tmp_path / "b.html", names=["x", "y"])
    assert "<title>x and y: 2 devices, 4 micro-batches</title>" in (tmp_path / "b.html").read_text()
    with pytest.raises(ValueError, match="are for figures"):
        treadle.draw(SCHEDULE, tmp_path / "c.html", fold=2)
    with pytest.raises(ValueError, match="up to where it hangs"):
        treadle.draw(HANGS, tmp_path / "c.html")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((3,), "a Schedule, a Program, a Trace, an UpdatePlan or a list of them, got int"),
        (([SCHEDULE, "1f1b"],), "or a list of them, got str"),
        ((SCHEDULE, "a.jpg"), "ends in .svg, .png, .pdf or .html, got 'a.jpg'"),
        ((SCHEDULE, "none/a.svg"), "there is no folder 'none'"),
    ],
)
def test_what_cannot_be_drawn(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        treadle.draw(*arguments)
    with pytest.raises(ValueError, match="have no gaps"):
        treadle.draw(SCHEDULE, ranks=[0, 2])


def test_without_matplotlib_there_is_text_and_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for place in ("notebook", "drawing"):
        monkeypatch.setattr(f"treadle.{place}.find_spec", lambda name: None)
    for shown in SHOWN.values():
        html = shown._repr_html_()
        assert html.startswith("<pre>")
        assert re.search(r"<p>figures need matplotlib: pip install &#x27;matplotlib\S*&#x27;</p>$", html)
    with pytest.raises(ImportError, match=r"install it with: pip install 'matplotlib"):
        treadle.draw(SCHEDULE, tmp_path / "a.svg")
    treadle.draw(SCHEDULE, tmp_path / "a.html")


@pytest.mark.slow
def test_a_notebook_shows_figures(tmp_path: Path) -> None:
    """A kernel of its own runs the cells; each output has an SVG, and the text for places without HTML.

    The kernel listens on sockets of a directory: TCP ports are chosen before the kernel binds them, and another test
    may take one in between.
    """
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    jupyter_client = pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    cells = [
        "import treadle\nschedule = treadle.generate('zb-h1', pp=2, microbatches=4)\nschedule",
        "unit = treadle.load_costs('unit')\nprogram = treadle.lower(schedule, unit)\nprogram",
        "treadle.simulate(program, unit)",
        "treadle.draw([schedule, treadle.generate('1f1b', pp=2, microbatches=4)], width='text')",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    kernel = jupyter_client.AsyncKernelManager(kernel_name="python3", transport="ipc", ip=str(tmp_path / "kernel"))
    nbclient.NotebookClient(book, km=kernel, timeout=120, startup_timeout=300).execute()
    for cell in book.cells:
        (output,) = cell.outputs
        assert output.data["text/html"].startswith("<svg ")
        assert output.data["text/plain"]
