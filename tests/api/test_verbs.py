"""The library as people call it: defaults that work, and errors in a sentence that names the way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import treadle
from tests.support.command import treadle as command
from tests.support.oracle import make_mesh
from tests.support.ranks import check, run_ranks
from treadle.ir.ops import OpKind
from treadle.weights.bucket_stream import even_stream
from treadle.weights.update_lowering import lower_update

SCHEDULE = treadle.generate("1f1b", pp=2, microbatches=4)


def test_a_schedule_is_simulated_with_defaults() -> None:
    unit = treadle.load_costs("unit")
    trace = treadle.simulate(SCHEDULE)
    assert trace.makespan == treadle.simulate(treadle.lower(SCHEDULE, unit), unit).makespan == 15 * unit.clock.ticks


def test_costs_are_taken_by_name() -> None:
    options = treadle.LoweringOptions(layers=1, moe=True)
    by_name = treadle.simulate(SCHEDULE, "deepseek-v3-h800", options)
    costs = treadle.load_costs("deepseek-v3-h800")
    assert by_name.makespan == treadle.simulate(treadle.lower(SCHEDULE, costs, options), costs).makespan


def test_programs_and_traces_are_verified_too() -> None:
    trace = treadle.simulate(SCHEDULE)
    assert str(treadle.verify(SCHEDULE)) == "clean: 2 ranks, 16 cells, peak 2 activations"
    assert treadle.verify(trace.program).clean
    assert treadle.verify(trace).num_ops == trace.program.num_ops
    update = lower_update(even_stream(4, 2))
    assert treadle.verify(update).clean
    assert treadle.simulate(update).makespan


def test_a_schedule_is_verified_under_costs_of_a_model() -> None:
    """Its Program is judged too, by the costs given, as `treadle verify` does."""
    report = treadle.verify(treadle.generate("1f1b", pp=4, microbatches=8), costs="deepseek-v3-model")
    assert report.clean
    assert report.peak_unit == "bytes"
    limited = treadle.verify(treadle.generate("1f1b", pp=4, microbatches=8), "deepseek-v3-model", memory_limit=10**9)
    assert {finding.code for finding in limited.findings} == {"T302"}


def test_options_mean_what_they_mean_on_the_command_line() -> None:
    """Layers exchange nothing with experts unless they are MoE layers."""
    schedule = treadle.generate("1f1b", pp=2, microbatches=4)
    program = treadle.lower(schedule, "deepseek-v3-h800", treadle.LoweringOptions(layers=4))
    typed = command("show", "1f1b", "--pp", "2", "-m", "4", "--layers", "4", "--costs", "deepseek-v3-h800", "--lower")
    assert typed.returncode == 0
    assert "dispatch" not in typed.stdout
    assert OpKind.DISPATCH_F not in set(program.kind.tolist())


def test_schedules_are_compared_positionally_under_one_model() -> None:
    one, other = (treadle.generate(name, pp=4, microbatches=8) for name in ("1f1b", "interleaved"))
    rows = treadle.compare(one, other).rows
    assert [row.name for row in rows] == ["1f1b", "interleaved"]
    assert [row.size.layers for row in rows] == [8, 8]
    assert [row.name for row in treadle.compare(one, one).rows] == ["1f1b", "1f1b (2)"]


def test_a_trace_reports_seconds() -> None:
    trace = treadle.simulate(SCHEDULE, "deepseek-v3-h800")
    assert trace.seconds == pytest.approx(trace.makespan / 1e9)


def test_the_text_of_a_schedule_is_read_back() -> None:
    assert treadle.loads(str(SCHEDULE)) == SCHEDULE
    assert str(SCHEDULE).splitlines()[-1] == "1: F0.0 B0.0 F1.0 B1.0 F2.0 B2.0 F3.0 B3.0"


def test_programs_and_traces_say_their_size() -> None:
    trace = treadle.simulate(SCHEDULE)
    assert str(trace.program) == "<Program: 2 ranks, 6 lanes, 32 ops>"
    assert str(trace) == "<Trace: 2 ranks, 32 ops, makespan 15; predicted with costs 'unit'>"


WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a name for a schedule": (
        lambda: treadle.simulate("1f1b"),  # type: ignore[arg-type]
        TypeError,
        r"takes a Schedule or a Program, got str '1f1b'; treadle\.generate\('1f1b', pp=\.\.\., ",
    ),
    "a trace to lower": (
        lambda: treadle.lower(treadle.simulate(SCHEDULE)),  # type: ignore[arg-type]
        TypeError,
        r"lower takes a Schedule, got Trace <Trace: .*; a Trace has its Program: trace\.program",
    ),
    "a number to verify": (
        lambda: treadle.verify(3),  # type: ignore[arg-type]
        TypeError,
        r"got int 3; treadle\.generate makes a Schedule",
    ),
    "costs misspelt": (lambda: treadle.simulate(SCHEDULE, "unti"), ValueError, "did you mean 'unit'"),
    "costs as a number": (
        lambda: treadle.simulate(SCHEDULE, 3),  # type: ignore[arg-type]
        TypeError,
        "such as 'unit', got int 3",
    ),
    "options as a dict": (
        lambda: treadle.lower(SCHEDULE, "unit", {"layers": 2}),  # type: ignore[arg-type]
        TypeError,
        r"options are treadle\.LoweringOptions\(\.\.\.\), got dict",
    ),
    "options of a program": (
        lambda: treadle.simulate(treadle.lower(SCHEDULE), "unit", treadle.LoweringOptions()),
        ValueError,
        "options set how a Schedule is lowered",
    ),
    "a size as text": (
        lambda: treadle.generate("1f1b", pp="4", microbatches=8),  # type: ignore[arg-type]
        TypeError,
        "pp is a whole number, an int, got str '4'",
    ),
    "bytes of a schedule": (
        lambda: treadle.verify(SCHEDULE, memory_limit=1),
        ValueError,
        "`memory_limit` is in bytes, which need layers: add `layers=N`",
    ),
    "activations of a program": (
        lambda: treadle.verify(treadle.lower(SCHEDULE), max_activations=1),
        ValueError,
        "`max_activations` is for schedules",
    ),
    "no activations of a program": (
        lambda: treadle.verify(treadle.lower(SCHEDULE), max_activations=0),
        ValueError,
        "`max_activations` is for schedules",
    ),
    "one to compare": (lambda: treadle.compare(SCHEDULE), ValueError, "comparing takes at least two, got 1"),
    "micro-batches by another name": (
        lambda: treadle.generate("1f1b", pp=4, m=8),  # type: ignore[call-arg]
        TypeError,
        "generate takes pp, vpp and microbatches, got m=8; write microbatches=8",
    ),
    "micro-batches as torch calls them": (
        lambda: treadle.generate("1f1b", pp=4, num_microbatches=8),  # type: ignore[call-arg]
        TypeError,
        "got num_microbatches=8; write microbatches=8",
    ),
    "seconds of units": (lambda: treadle.simulate(SCHEDULE).seconds, ValueError, "in units, which have no length"),
    "layers that nobody gave": (
        lambda: treadle.lower(SCHEDULE, "unit", treadle.LoweringOptions(offload=True)),
        ValueError,
        "`offload` works layer by layer, and how many layers there are is not known; add `model_layers=N`",
    ),
    "a schedule that hangs": (
        lambda: treadle.simulate(treadle.loads("0: F0.0 B0.0 F1.0 B1.0\n1: F0.0 F1.0 B0.0 B1.0\n")),
        ValueError,
        "the schedule is not sound: T201",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_error_names_the_way_out(what: str) -> None:
    call, kind, match = WRONG[what]
    with pytest.raises(kind, match=match):
        call()


ODD: list[tuple[object, object, object, str]] = [
    ([], SCHEDULE, None, r"stages are \{chunk: nn\.Module\} of this rank, such as \{0: module\}, got list \[\]"),
    ({}, "1f1b", None, r"the schedule is a treadle\.Schedule, got str '1f1b'; treadle\.generate makes one"),
    ({}, SCHEDULE, ["a"], r"tied is \{name: \{stage: the parameter's name in it\}\}, such as"),
]


def refuse_odd(rank: int) -> None:
    for stages, schedule, tied, match in ODD:
        with pytest.raises(TypeError, match=match):
            treadle.Pipeline(stages, schedule, mesh=make_mesh(1), loss_fn=print, tied=tied)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_pipeline_refuses_arguments_of_another_type() -> None:
    check(run_ranks(1, refuse_odd))
    with pytest.raises(TypeError, match=r"the mesh is a DeviceMesh .* got NoneType None; make it by init_device_mesh"):
        treadle.Pipeline({}, SCHEDULE, mesh=None, loss_fn=print)  # type: ignore[arg-type]
