"""The command line as a person or a script meets it: exit codes, what goes to which stream, what a terminal shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer

import treadle
from tests.support.command import TREADLE, real_treadle
from tests.support.command import treadle as run
from tests.support.paths import ROOT
from tests.support.patience import HUNG_S
from treadle.cli.app import COMMANDS
from treadle.verifier import CODES

BAR_AT_ONCE = """
import sys
import threading
import treadle.cli.terminal as terminal
from treadle.cli import main

class Timer(threading.Timer):
    def start(self):
        self.function()

threading.Timer = Timer
main()
"""
"""The command line with a progress bar from the start of all work, however soon it is done."""


def on_a_terminal(*command: str) -> str:
    """What a person sees, both streams on one terminal."""
    done = subprocess.run(
        ["script", "--quiet", "--return", "--command", " ".join(command), "/dev/null"],
        capture_output=True,
        text=True,
        timeout=HUNG_S,
    )
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.stdout)


def test_an_installed_command_has_the_same_end_as_one_that_runs_here(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("0: F0.0 F1.0 B0.0 B1.0\n1: F0.0 F1.0 (F2.0|B0.0) B1.0 B2.0\n")
    for code, args, stdin in (
        (0, ("verify", "-"), "0: F0.0 B0.0\n"),
        (1, ("verify", "mine.txt", "--all"), ""),
        (2, ("verify", "nothing.txt"), ""),
    ):
        done = real_treadle(*args, stdin=stdin, cwd=tmp_path)
        assert done.returncode == code
        assert done == run(*args, stdin=stdin, cwd=tmp_path)
        assert bool(done.stdout) == (code != 2)
        assert bool(done.stderr) == (code == 2)


@pytest.mark.slow
def test_show_prints_rows_and_reads_every_form_back(tmp_path: Path) -> None:
    rows = run("show", "1f1b", "--pp", "2", "-m", "2", "--rows")
    assert rows.stdout == "0: F0.0 F1.0 B0.0 B1.0\n1: F0.0 B0.0 F1.0 B1.0\n"
    assert rows.stderr == ""
    for form in ("text", "torch-csv", "json"):
        written = run("show", "zb-v", "--pp", "2", "--microbatches", "4", "--format", form).stdout
        (tmp_path / "schedule").write_text(written)
        again = run("show", "schedule", "--rows", cwd=tmp_path)
        assert again.stdout == run("show", "-", "--rows", stdin=written).stdout
        assert again.stdout.startswith("0: F0.0 F1.0 F2.0 F0.1 I0.1")


@pytest.mark.parametrize("command", ["schedules", "explain"])
def test_listings_as_json(command: str) -> None:
    listed = json.loads(run(command, "--json").stdout)
    names = list(listed["findings"]) if command == "explain" else [entry["name"] for entry in listed["schedules"]]
    assert names == list(CODES if command == "explain" else treadle.schedules.SCHEDULES)


def test_verify_says_clean_in_a_line_and_exits_0() -> None:
    done = run("verify", "dualpipe", "--pp", "8", "-m", "20")
    assert (done.returncode, done.stdout) == (0, "clean: 8 ranks, 282 cells, peak 9 activations\n")


def test_verify_exits_1_and_names_both_sides(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("0: F0.0 F1.0 B0.0 B1.0\n1: F0.0 F1.0 (F2.0|B0.0) B1.0 B2.0\n")
    done = run("verify", "mine.txt", "--all", cwd=tmp_path)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "T101 rank 0: F2.0 of stage 0 is missing" in lines
    assert "T202 rank 1: receive F2.0 from rank 0 is number 3 on its channel, but rank 0 sends only 2" in lines


def test_verify_points_at_the_cell() -> None:
    done = run("verify", "-", stdin="0: F0.0 F1.0 B1.0 B0.0 F1.0\n")
    assert done.returncode == 1
    first, row, caret = done.stdout.splitlines()[:3]
    assert first == "T102 rank 0: F1.0 runs more than once"
    assert row.strip() == "0: F0.0 F1.0 B1.0 B0.0 F1.0"
    assert caret == " " * row.rindex("F1.0") + "^^^^"


@pytest.mark.slow
def test_verify_says_where_it_stopped_listing() -> None:
    rows = "\n".join(f"{rank}: {' '.join(f'F{mb}.0' for mb in range(1500))}" for rank in range(2))
    done = run("verify", "-", stdin=rows)
    assert done.returncode == 1
    assert "T101: past 1,000 findings no more were looked for" in done.stdout.splitlines()


def test_verify_as_json() -> None:
    done = run("verify", "gpipe", "--pp", "2", "-m", "4", "--max-activations", "3", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert report["clean"] is False
    assert report["peak_activations"] == [4, 4]
    assert report["cut"] == []
    assert {finding["code"] for finding in report["findings"]} == {"T301"}


def test_a_limit_that_a_program_has_no_use_for_is_refused(tmp_path: Path) -> None:
    run("show", "gpipe", "--pp", "2", "-m", "4", "--lower", "-o", str(tmp_path / "p.npz"))
    for given in (("--max-activations", "1"), ("--max-activations", "0"), ("--receives", "use")):
        done = run("verify", str(tmp_path / "p.npz"), *given)
        assert done.returncode == 2
        assert f"{given[0]} is for schedules" in done.stderr
    assert run("verify", str(tmp_path / "p.npz")).returncode == 0


def test_a_measured_run_is_not_verified(tmp_path: Path) -> None:
    trace = str(tmp_path / "trace.json.gz")
    assert run("import", str(ROOT / "examples" / "profiles" / "megatron"), "-o", trace).returncode == 0
    done = run("verify", trace)
    assert done.returncode == 2
    assert "verify the schedule that ran: 'treadle import PROFILE --schedule ran.txt'" in done.stderr


def test_messages_of_the_library_name_options() -> None:
    done = run("simulate", "1f1b", "--pp", "4", "-m", "8", "--offload")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--offload works layer by layer" in done.stderr
    assert "add --model-layers N, or --layers N for each stage" in done.stderr


@pytest.mark.slow
def test_options_of_verify_change_the_verdict() -> None:
    zb_v = ("verify", "zb-v", "--pp", "4", "-m", "8")
    assert run(*zb_v).returncode == 0
    assert "T204" in run(*zb_v, "--receives", "use").stdout
    assert "needs the buffer that is freed by" in run(*zb_v, "--ring", "1").stdout
    assert run(*zb_v, "--ring", "8").returncode == 0


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("show", "dualpip", "--pp", "4", "-m", "8"), ["did you mean 'dualpipe'?"]),
        (("show", "dualpipe", "--pp", "7", "-m", "16"), ["even number of ranks", "nearest size", "pp=8"]),
        (("show", "1f1b", "--pp", "4", "--vpp", "2", "-m", "8"), ["puts 1 stage", "'interleaved' takes more"]),
        (("show", "1f1b"), ["--pp and --microbatches", "--pp 4 -m 8"]),
        (("show", "1f1b", "--pp", "0", "-m", "8"), ["at least 1", "pp=1"]),
        (("verify", "nothing.txt"), ["nothing.txt: No such file"]),
        (("verify", "."), ["no traces"]),
        (("show", "dualpipe", "--pp", "4", "-m", "8", "--format", "torch-csv"), ["second direction", "dualpipev"]),
        (("show", "1f1b", "--pp", "2", "-m", "2", "--rows", "--json"), ["--rows is for the text form"]),
        (("verify", "1f1b", "--pp", "2", "-m", "2", "--ring", "0"), ["at least 1 buffer"]),
        (("explain", "T999"), ["not a code", "T101"]),
        (("verify", "1f1b", "--pp", "2", "-m", "2", "--placement", "v"), ["brings its own placement"]),
    ],
)
def test_a_users_mistake_is_a_sentence(args: tuple[str, ...], parts: list[str]) -> None:
    done = run(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


def test_trailing_junk_is_pointed_at() -> None:
    done = run("verify", "-", stdin="0: F0.0 B0.0x\n")
    assert done.returncode == 2
    assert "<stdin>:1:13" in done.stderr
    assert done.stderr.splitlines()[2] == " " * (2 + 12) + "^"


def test_a_file_and_a_size_that_disagree() -> None:
    done = run("verify", "-", "--pp", "3", stdin="0: F0.0 B0.0\n")
    assert done.returncode == 2
    assert "<stdin> has pp 1, got --pp 3" in done.stderr


@pytest.mark.slow
def test_rows_alone_take_a_placement() -> None:
    rows = run("show", "zb-v", "--pp", "4", "-m", "8", "--rows").stdout
    assert run("verify", "-", stdin=rows).returncode == 1
    assert run("verify", "-", "--placement", "v", stdin=rows).returncode == 0


def test_a_closed_pipe_is_no_error() -> None:
    done = subprocess.run(
        f"{TREADLE} show interleaved --pp 64 -m 1024 | head -c 13", shell=True, capture_output=True, timeout=HUNG_S
    )
    assert done.stdout == b"# treadle-sch"
    assert done.stderr == b""


def test_a_person_gets_the_next_command_and_a_script_does_not() -> None:
    args = ("verify", "1f1b", "--pp", "4", "-m", "8", "--max-activations", "1")
    assert "next: treadle explain T301" in on_a_terminal(TREADLE, *args)
    assert "next:" not in run(*args).stderr


def test_a_terminal_shows_progress_and_a_script_does_not(tmp_path: Path) -> None:
    (tmp_path / "bar_at_once.py").write_text(BAR_AT_ONCE)
    command = (sys.executable, str(tmp_path / "bar_at_once.py"), "verify", "zb-h1", "--pp", "2", "-m", "4")
    seen = on_a_terminal(*command)
    assert "generating zb-h1" in seen
    assert "clean: 2 ranks" in seen
    done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG_S, check=True)
    assert (done.stdout, done.stderr) == ("clean: 2 ranks, 24 cells, peak 2 activations\n", "")


@pytest.mark.parametrize("command", ["schedules", "show", "verify", "explain"])
def test_every_help_has_an_example(command: str) -> None:
    assert f"treadle {command}" in run(command, "--help").stdout.split("Example")[1]


@pytest.mark.slow
def test_simulate_as_json() -> None:
    result = json.loads(run("simulate", "dualpipe", "--pp", "8", "-m", "20", "--json").stdout)
    assert result["makespan"] == 66
    assert result["num_ops"] == 924
    assert round(result["bubble"], 4) == 0.0909
    assert len(result["ranks"]) == 8
    assert (result["peak"]["unit"], result["peak"]["most"], len(result["peak"]["ranks"])) == ("activations", 9, 8)
    assert result["taken_as_zero"] == []
    assert result["critical_path"]["num_ops"] > 0


@pytest.mark.slow
def test_a_program_and_its_trace_through_files(tmp_path: Path) -> None:
    size = ("interleaved-overlap", "--pp", "4", "-m", "8", "--layers", "2", "--moe", "--costs", "deepseek-v3-h800")
    assert run("show", *size, "--lower", "-o", "program.npz", cwd=tmp_path).returncode == 0
    assert run("verify", "program.npz", cwd=tmp_path).stdout.startswith("clean: 4 ranks, ")
    costs = ("--costs", "deepseek-v3-h800")
    makespans = set()
    for name in ("trace.json", "trace.json.gz", "trace.npz"):
        done = run("simulate", "program.npz", *costs, "-o", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        makespans.add(json.loads(run("simulate", name, "--json", cwd=tmp_path).stdout)["makespan"])
    assert len(makespans) == 1
    run("simulate", "program.npz", *costs, "--slowness", "0.1", "-o", "slow.npz", cwd=tmp_path)
    compared = run("compare", "trace.json", "slow.npz", "--fit", "fitted.toml", "--json", cwd=tmp_path)
    rows = json.loads(compared.stdout)["rows"]
    assert rows[1]["makespan"]["ratio"] > 1
    fitted = json.loads(run("simulate", "program.npz", "--costs", "fitted.toml", "--json", cwd=tmp_path).stdout)
    assert rows[0]["makespan"]["value"] < fitted["makespan"] < 1.1 * rows[0]["makespan"]["value"]


@pytest.mark.slow
def test_memory_limit_and_offload() -> None:
    size = ("interleaved-overlap", "--pp", "4", "-m", "8", "--layers", "2", "--moe", "--costs", "deepseek-v3-h800")
    over = run("verify", *size, "--memory-limit", "4GB")
    assert over.returncode == 1
    assert "T302 rank 0" in over.stdout
    assert run("verify", *size, "--memory-limit", "4GB", "--offload").returncode == 0


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("simulate", "1f1b", "--pp", "2", "-m", "2", "--costs", "deepsek-v3-h800"), ["did you mean", "deepseek-v3"]),
        (("simulate", "1f1b", "--pp", "2", "-m", "2", "--layers", "0"), ["--layers takes a number from 1"]),
        (("simulate", "1f1b", "--pp", "2", "-m", "2", "--layers", "1,2,3"), ["one for each of 2 stages"]),
        (("simulate", "1f1b", "--pp", "2", "-m", "2", "--offload"), ["--offload works layer by layer", "--layers N"]),
        (("simulate", "1f1b", "--pp", "2", "-m", "2", "--ep", "4"), ["--layers N --moe"]),
        (("simulate", "1f1b", "--pp", "2", "-m", "2", "-o", "trace.txt"), [".json, .json.gz or .npz"]),
        (("show", "1f1b", "--pp", "2", "-m", "2", "--lower", "--rank", "9"), ["ranks go from 0 to 1", "got 9"]),
        (("show", "1f1b", "--pp", "2", "-m", "2", "-o", "x.npz"), ["add --lower"]),
        (("verify", "1f1b", "--pp", "2", "-m", "2", "--memory-limit", "4GB"), ["--layers", "--max-activations"]),
        (("verify", "1f1b", "--pp", "2", "-m", "2", "--layers", "1", "--memory-limit", "4XB"), ["80GB, 512MiB or 4e9"]),
        (("compare", "1f1b", "--pp", "2", "-m", "2"), ["at least two"]),
        (("simulate", "1f1b", "--pp", "4", "-m", "4", "--model-layers", "3"), ["3 layers", "4 stages", "at least 4"]),
        (
            ("simulate", "1f1b", "--pp", "2", "-m", "2", "--model-layers", "4", "--layers", "2"),
            ["leave out all but one"],
        ),
        (("simulate", "1f1b", "--pp", "2", "-m", "2", "--moe"), ["--moe works layer by layer", "--model-layers N"]),
        (
            ("verify", "1f1b", "--pp", "2", "-m", "2", "--model-layers", "4", "--memory-limit", "1GB"),
            ["'unit' do not say what layers save", "[saved_bytes] attn, mlp"],
        ),
        (
            ("compare", "1f1b", "interleaved", "--pp", "2", "-m", "2", "--layers", "2"),
            ["1f1b 4, interleaved 8", "--model-layers 8 --by-layer"],
        ),
        (("compare", "1f1b", "gpipe", "--pp", "2", "-m", "2", "--vpp", "3"), ["puts 1 stage on each rank"]),
        (("compare", "1f1b", "interleaved:v=2", "--pp", "2", "-m", "2"), ["interleaved:vpp=2,m=16", "got 'v=2'"]),
    ],
)
def test_mistakes_with_programs_are_sentences_too(args: tuple[str, ...], parts: list[str]) -> None:
    test_a_users_mistake_is_a_sentence(args, parts)


def test_compare_holds_the_model() -> None:
    """interleaved is faster than 1f1b for one model; as chunks of one size it would take 1.84 times as long."""
    done = run("compare", "1f1b", "interleaved", "zb-v", "dualpipev", "--pp", "4", "-m", "16")
    *table, held = done.stdout.splitlines()
    assert held == "same for all: 8 layers, 4 ranks, 16 micro-batches; a layer's forward takes 1"
    assert [line.split()[:4] for line in table[1:]] == [
        ["1f1b", "114", "1.000x", "15.79%"],
        ["interleaved", "105", "0.921x", "8.57%"],
        ["zb-v", "99", "0.868x", "0.00%"],
        ["dualpipev", "102", "0.895x", "5.88%"],
    ]
    assert [line.split()[-2:] for line in table[1:]] == [[peak, "layers"] for peak in ("8", "11", "8", "9")]


@pytest.mark.slow
def test_compare_has_sizes_for_each_target() -> None:
    size = ("--pp", "4", "-m", "8", "--model-layers", "48", "--json")
    done = run("compare", "1f1b", "interleaved", "interleaved:vpp=4", *size, "--vpp", "3")
    assert done.stderr == "note: --vpp 3 is not for all of them: 1f1b keeps 1\n"
    compared = json.loads(done.stdout)
    assert compared["held"] == "same for all: 48 layers, 4 ranks, 8 micro-batches"
    assert [row["size"]["layers"] for row in compared["rows"]] == [48, 48, 48]
    assert [row["peak"]["unit"] for row in compared["rows"]] == ["layers"] * 3
    bubbles = [row["bubble"]["value"] for row in compared["rows"]]
    assert bubbles == sorted(bubbles, reverse=True)


@pytest.mark.slow
def test_compare_with_costs_of_a_chunk(tmp_path: Path) -> None:
    (tmp_path / "chunk.toml").write_text("[cells]\nf = 3\nb = 6\n")
    size = ("--pp", "4", "-m", "8", "--costs", "chunk.toml")
    refused = run("compare", "1f1b", "interleaved", *size, cwd=tmp_path)
    assert refused.returncode == 2
    assert "say what a chunk takes" in refused.stderr
    assert "1f1b 4, interleaved 8" in refused.stderr
    alike = run("compare", "1f1b", "gpipe", *size, cwd=tmp_path)
    assert "model layers: unknown; a chunk's forward takes 3 us" in alike.stdout
    assert alike.stderr == "note: taken as 0: send (not in costs 'chunk.toml')\n"
    (tmp_path / "chunk.toml").write_text("[cells]\nlayers = 2\nf = 3\nb = 6\n[message]\nsend = 0\n")
    held = run("compare", "1f1b", "interleaved", *size, cwd=tmp_path)
    assert "same for all: 8 layers, 4 ranks, 8 micro-batches; a layer's forward takes 1.5 us" in held.stdout
    assert held.stderr == ""


@pytest.mark.slow
def test_what_costs_do_not_say_is_said(tmp_path: Path) -> None:
    (tmp_path / "layer.toml").write_text(
        "[layer]\nattn_f = 3\nmlp_f = 3\nattn_b = 5\nmlp_b = 5\nmlp_w = 1\nattn_w = 1\n"
    )
    size = ("1f1b", "--pp", "2", "-m", "4", "--model-layers", "4", "--moe", "--padded", "--costs", "layer.toml")
    done = run("simulate", *size, "--json", cwd=tmp_path)
    assert done.stderr == "note: taken as 0: send, dispatch, combine (not in costs 'layer.toml')\n"
    assert json.loads(done.stdout)["taken_as_zero"] == ["send", "dispatch", "combine"]
    limit = run("verify", *size, "--memory-limit", "1GB", cwd=tmp_path)
    assert limit.returncode == 2
    assert "[saved_bytes] attn, mlp" in limit.stderr


def test_costs_are_checked_and_shown(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[cells]\nf = -3\n\n[layer]\natn_f = 3\n")
    done = run("costs", "check", "bad.toml", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "wrong bad.toml:2: [cells] f is a number from 0, below 1e+12, got -3",
        "wrong bad.toml:5: [layer] atn_f is not known; did you mean 'attn_f'?",
    ]
    (tmp_path / "mine.toml").write_text(run("costs", "show", "deepseek-v3-h800").stdout)
    right = run("costs", "check", "mine.toml", "--json", cwd=tmp_path)
    assert right.returncode == 0
    told = json.loads(right.stdout)
    assert told["problems"] == []
    assert [lack["names"] for lack in told["lacks"]] == [
        ["[message] reduce_scatter"],
        ["[ends] embed_f", "[ends] head_f"],
    ]
    assert json.loads(run("costs", "schema").stdout)["type"] == "object"


@pytest.mark.slow
def test_many_ranks_are_put_together() -> None:
    shown = run("simulate", "gpipe", "--pp", "32", "-m", "4").stdout.splitlines()
    assert [line.split()[0] for line in shown if "activations" in line and "rank" not in line] == ["0-31"]
    assert "most idle: 93 (rank 0), median 93; highest peak: 4 activations (rank 0), median 4 activations" in shown
    few = run("simulate", "gpipe", "--pp", "4", "-m", "4").stdout.splitlines()
    assert [line.split()[0] for line in few[2:6]] == ["0", "1", "2", "3"]


def test_a_schedule_that_is_not_sound_is_not_simulated() -> None:
    done = run("simulate", "-", stdin="0: F0.0 B0.0 F1.0 B1.0\n1: F0.0 F1.0 B0.0 B1.0\n")
    assert done.returncode == 2
    assert "the schedule is not sound: T201" in done.stderr


@pytest.mark.slow
def test_draw_on_the_terminal_and_into_files(tmp_path: Path) -> None:
    rows = run("draw", "1f1b", "--pp", "2", "-m", "2").stdout.splitlines()
    assert rows[0].startswith("0  F0")
    assert rows[1].startswith("1  ")
    size = ("interleaved-overlap", "--pp", "4", "-m", "8", "--layers", "1", "--moe", "--offload")
    for name, options in (
        ("cells.svg", ()),
        ("lanes.png", ("--grain", "lanes", "--memory", "--ranks", "0-1")),
        ("cell.pdf", ("--cell", "steady")),
        ("page.html", ()),
    ):
        target = size if name != "cells.svg" else size[:5]
        done = run("draw", *target, *options, "-o", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / name).stat().st_size > 1000
        assert done.stderr.startswith(f"wrote {name} (")
    done = run("draw", "1f1b", "zb-h1", "--pp", "2", "-m", "4", "--width", "column", "-o", "two.svg", cwd=tmp_path)
    assert done.stderr.startswith("wrote two.svg (3.30 x ")


@pytest.mark.slow
def test_a_deadlock_is_drawn_up_to_where_it_hangs(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("0: F0.0 B0.0 F1.0 B1.0\n1: F0.0 F1.0 B0.0 B1.0\n")
    for output in ((), ("-o", "x.svg")):
        done = run("draw", "mine.txt", *output, cwd=tmp_path)
        assert done.returncode == 1
        assert "T201 rank 0: deadlock: 6 ops wait for each other in a circle" in done.stderr
        assert "rank 1: B0.0 is behind F1.0" in done.stderr
    assert "!B0" in run("draw", "mine.txt", cwd=tmp_path).stdout
    assert (tmp_path / "x.svg").exists()
    done = run("draw", "mine.txt", "-o", "x.html", cwd=tmp_path)
    assert done.returncode == 2
    assert "draws it up to where it hangs" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("draw", "1f1b", "--pp", "2", "-m", "2", "-o", "x.gif"), [".svg, .png, .pdf or .html"]),
        (("draw", "1f1b", "--pp", "2", "-m", "2", "--grain", "lanes", "-o", "x.png"), ["--layers"]),
        (("draw", "1f1b", "--pp", "2", "-m", "2", "--palette", "kim"), ["did you mean 'kimi'"]),
        (("draw", "1f1b", "--pp", "2", "-m", "2", "-o", "x.png", "--window", "9:2"), ["as 20:45, got '9:2'"]),
        (("draw", "1f1b", "--pp", "2", "-m", "2", "-o", "x.png", "--ranks", "3-1"), ["such as 0-7"]),
        (("draw", "1f1b", "--pp", "2", "-m", "2", "-o", "no/x.png"), ["there is no folder 'no'"]),
        (("draw", "1f1b", "--pp", "2", "-m", "2", "--fold", "2"), ["--fold is for a figure", "add -o figure.svg"]),
        (("draw", "1f1b", "--pp", "2", "-m", "2", "--width", "3", "-o", "x.html"), ["--width", "not for a page"]),
        (("show", "1f1b", "--pp", "1000000001", "-m", "8"), ["at most 65536 ranks", "nearest size", "pp=65536"]),
        (("show", "dualpipe", "--pp", "8001", "-m", "8"), ["even number of ranks", "it needs even P"]),
        (("show", "gpipe", "--pp", "4", "-m", "5000000"), ["at most 1000000 micro-batches"]),
    ],
)
def test_mistakes_with_pictures_and_sizes_are_sentences_too(args: tuple[str, ...], parts: list[str]) -> None:
    test_a_users_mistake_is_a_sentence(args, parts)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_their_own_help_says(name: str) -> None:
    place = "import_" if name == "import" else name.replace("-", "_")  # a word of Python's own
    command = getattr(import_module(f"treadle.cli.commands.{place}"), place)
    about = command.info.help if isinstance(command, typer.Typer) else command.__doc__.split("\n\n")[0]
    assert COMMANDS[name].about == about
