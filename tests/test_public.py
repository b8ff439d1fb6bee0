"""The public face: every name of `treadle.__all__` resolves, is listed, and has an example that runs."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from importlib import import_module
from inspect import getdoc, isfunction, signature
from pathlib import Path

import pytest

import treadle


def test_all_names_resolve_and_are_listed() -> None:
    assert len(treadle.__all__) <= 26
    for name in treadle.__all__:
        assert getattr(treadle, name) is not None
        assert name in dir(treadle)


SHOWN = {
    "treadle": treadle.__all__,
    "treadle.host.errors": ("TreadleError",),
    "treadle.ir": ("Action", "B", "F", "I", "Kind", "Pair", "Placement", "W"),
    "treadle.runtime": ("FurtherLoss", "MTPBlock", "Segment", "StepReport", "compute", "exchange"),
    "treadle.simulator": ("Durations", "critical_path"),
    "treadle.step": ("Step",),
    "treadle.verifier": ("Finding", "VerifyReport", "explain", "verify_program"),
}
"""Names with an example, by the module that people import them from."""


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in SHOWN.items() for name in names])
def test_example_of_public_name_runs(module: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    value = getattr(import_module(module), name)
    defined = sys.modules[value.__module__]
    globs = {**vars(defined), "treadle": treadle, "F": treadle.ir.F, "B": treadle.ir.B}
    test = doctest.DocTestParser().get_doctest(value.__doc__ or "", globs, name, None, None)
    assert test.examples, f"{module}.{name} has no example"
    told: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=told.append)
    assert not told, "".join(told)


@pytest.mark.parametrize("name", [name for name in treadle.__all__ if isfunction(getattr(treadle, name))])
def test_public_function_says_what_it_takes_and_returns(name: str) -> None:
    function = getattr(treadle, name)
    about = getdoc(function) or ""
    assert "Args:" in about
    for parameter in signature(function).parameters:
        assert f"\n    {parameter}: " in about, parameter
    assert "Returns:" in about or about.startswith("Return") or signature(function).return_annotation == "None"


@pytest.mark.slow
def test_packages_resolve_and_planning_imports_no_torch() -> None:
    code = (
        "import sys, treadle; assert 'torch' not in sys.modules; dir(treadle); assert 'torch' not in sys.modules; "
        "import treadle.verifier.codes; from treadle.verifier.codes import CODES; import treadle.simulator.metrics; "
        "assert callable(treadle.verify) and callable(treadle.simulate); assert 'torch' not in sys.modules; "
        "assert treadle.moe.MoELayer; assert treadle.update.UpdateOptions; assert treadle.models.ModelConfig"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


def test_schedule_program_and_trace_show_a_figure_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = treadle.load_costs("unit")
    schedule = treadle.generate("1f1b", pp=2, microbatches=2)
    program = treadle.lower(schedule, unit)
    for shown in (schedule, program, treadle.simulate(program, unit)):
        pytest.importorskip("matplotlib")
        assert (shown._repr_html_() or "").startswith("<svg")
    monkeypatch.setattr("treadle.notebook.find_spec", lambda name: None)
    for shown in (schedule, program, treadle.simulate(program, unit)):
        html = shown._repr_html_() or ""
        assert html.startswith("<pre>")
        assert "F0" in html or "rank 0" in html
