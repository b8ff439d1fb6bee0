"""Every command that a message suggests runs as it is printed: hints, advice, errors, and examples of help texts."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import treadle
from tests.support.command import Finished
from tests.support.command import treadle as run
from tests.support.paths import ROOT
from tests.support.recorded_transport import RecordedRun, record
from treadle.cli import terminal
from treadle.cli.app import COMMANDS, make_command
from treadle.integrations import torch_pipelining
from treadle.verifier import CODES

SOURCES = ROOT / "src" / "treadle"
PROFILES = ROOT / "examples" / "profiles"

LAYER = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale
"""
FILES = {
    "my schedule.txt": "0: F0.0 F1.0 B0.0 B1.0\n1: F0.0 B0.0 F1.0 B1.0\n",
    "mine.txt": "0: F0.0 F1.0 B0.0 B1.0\n1: F0.0 B0.0 F1.0 B1.0\n",
    "hangs.txt": "0: F0.0 B0.0 F1.0 B1.0\n1: F0.0 F1.0 B0.0 B1.0\n",
    "my costs.toml": "[cells]\nlayers = 1\nf = 100\ni = 90\nw = 60\n",
    "mine.toml": "[cells]\nlayers = 1\nf = 100\ni = 90\nw = 60\n",
    "two mistakes.toml": "[cells]\nf = -1\ni = 'x'\n",
    "slow last.toml": "[cells]\nf = 100\ni = 90\nw = 60\n[stage.7]\nfactor = 2.0\n",
    "my_layers.py": LAYER,
    "ours.toml": 'name = "ours"\ngpu = "h100"\nnum_gpus = 64\n',
    "config.json": json.dumps(
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "num_hidden_layers": 8,
            "vocab_size": 32000,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 4096,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 768,
        }
    ),
    "runs.csv": "model,tp,pp,ep,global_batch_size,step_s\nqwen3-30b-a3b,1,4,8,512,4.7\nqwen3-30b-a3b,1,2,8,512,4.5\n",
}

PRODUCERS = """
treadle schedules
treadle show 1f1b --pp 4 -m 8
treadle show 'my schedule.txt' --lower --model-layers 4 --costs 'my costs.toml'
treadle show 1f1b --pp 4 -m 8 --lower -o 'my program.npz'
treadle simulate-update --devices 2 --rounds 2
treadle simulate-update --devices 2 --rounds 2 -o 'my update.npz'
treadle show 'my update.npz'
treadle verify 'my schedule.txt' --model-layers 4 --costs 'my costs.toml'
treadle verify hangs.txt
treadle simulate 1f1b --pp 4 -m 8 --stragglers 25% --seed 3 --costs 'my costs.toml'
treadle simulate zb-v --pp 4 -m 8 --costs 'slow last.toml' -o 'my v.json'
treadle simulate zb-v --pp 4 -m 8 --layers 1 --costs deepseek-v3-h800 -o 'my layers.npz'
treadle simulate 1f1b --pp 2 -m 2 --costs 'two mistakes.toml'
treadle compare 1f1b zb-h1 --pp 4 -m 8
treadle compare 'my v.json' --fit 'my fitted.toml'
treadle compare 'my layers.npz' --fit 'my parts.toml'
treadle import 'my profile'
treadle import 'my profile' -o 'my run.json.gz'
treadle import littered
treadle why 'my profile'
treadle why torch/rank0_trace.json.gz torch/rank1_trace.json.gz torch/rank2_trace.json.gz torch/rank3_trace.json.gz
treadle why 'my profile' -o why.html
treadle why 'my run.json.gz'
treadle why 'my run.json.gz' -o why.html
treadle why 'my v.json'
treadle why 'my layers.npz'
treadle hang 'my dumps/circle' --schedule 1f1b --pp 2 -m 4
treadle hang 'another order' --schedule 1f1b --pp 4 -m 6
treadle balance --pp 4 --model-layers 16 --costs 'my costs.toml'
treadle balance --pp 2 --vpp 2 --model config.json --cluster h100:64 --ep 8
treadle balance --pp 4 --placement v --model-layers 16 --costs 'my costs.toml' --dense 1
treadle plan --model config.json --cluster h100:64 --tp 1 --pp 2 --ep 8 --micro-batch-size 1 --schedule 1f1b
treadle plan --model config.json --cluster h100:64 --tp 1 --pp 2 --ep 8 --schedule 1f1b --trainable --files 'my plan'
treadle calibrate --cluster h800:64 --measured runs.csv
treadle calibrate --cluster h800:64 --measured runs.csv -o 'my cluster.toml'
treadle synthesize --pp 2 -m 2
treadle synthesize --pp 2 -m 2 -o 'my order.txt'
treadle draw 1f1b zb-h1 --pp 4 -m 8
treadle dryrun 1f1b --pp 2 -m 2
treadle costs check 'my costs.toml'
treadle costs show deepseek-v3-h800
treadle costs measure my_layers.py:Block --input 2,8 --layers 8 --steps 1 -o 'my layer.toml'
treadle explain
treadle explain T201
treadle schema
""".strip().splitlines()
"""Commands after which something is suggested. Names have spaces, as users' have."""

NARROWED = "--tp 1 --pp 2 --ep 8 --micro-batch-size 1 --schedule 1f1b"
"""What is added to plans of the whole space, which take minutes."""

NOT_RUN = {
    "treadle selfcheck": "takes a minute; tests/selfcheck runs it",
    "treadle update": "needs an engine; tests/update runs it",
    "treadle agent": "needs an engine; tests/update runs it",
    "treadle synthesize --pp 4": "takes its time limit; docs/synthesize.md has a smaller one",
    "treadle synthesize --pp 8": "takes its time limit; docs/synthesize.md has a smaller one",
    "treadle dryrun dualpipe": "takes seconds; tests/runtime/test_dryrun.py runs larger ones",
    "treadle plan --model kimi-k2": "takes minutes; docs/plan.md has smaller ones",
}
"""Commands whose options are read here, and no more."""

_TREADLE = re.compile(rf"(?:treadle (?:{'|'.join(COMMANDS)})|python -m treadle\.train)\b")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Suggested(NamedTuple):
    """Commands, where they run, and the file and line of each hint among them."""

    directory: Path
    lines: set[str]
    places: set[tuple[str, int]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("suggested")
    for name, text in FILES.items():
        (made / name).write_text(text)
    (made / "my profile").symlink_to(PROFILES / "megatron")
    (made / "torch").symlink_to(PROFILES / "torch")
    (made / "my dumps").symlink_to(ROOT / "examples" / "dumps")
    (made / "dumps").symlink_to(ROOT / "examples" / "dumps" / "stalled")
    (made / "littered").mkdir()
    (made / "littered" / "timeline.json.gz").symlink_to(PROFILES / "megatron" / "timeline.json.gz")
    for number in range(8):
        (made / "littered" / f"{number}.log").write_text("nothing to read\n")
    return made


@pytest.fixture(scope="module")
def suggested(directory: Path) -> Suggested:
    usual, other = (treadle.generate(name, pp=4, microbatches=6) for name in ("1f1b", "gpipe"))
    record(RecordedRun(directory / "another order", (usual, other, usual, usual)))
    """What the producers suggest, and the files that they leave."""
    found: set[str] = set()
    places: set[tuple[str, int]] = set()
    say = terminal._say

    def seen(head: str, style: str, message: str) -> None:
        if head == "next":
            frame = sys._getframe(2)
            places.add((frame.f_code.co_filename, frame.f_lineno))
        say(head, style, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "_say", seen)
        for line in PRODUCERS:
            done = run(*shlex.split(line)[1:], cwd=directory, at_terminal=True)
            assert "No such option" not in done.stderr, line
            found |= set(_commands_of(done))
    return Suggested(directory, found, places)


def _commands_of(done: Finished) -> Iterator[str]:
    """The commands of an output: hints, lines of their own, and those in quotes or at the end of a remark."""
    for line in _ESCAPES.sub("", done.stdout + done.stderr).splitlines():
        hint = re.fullmatch(r"(?:next:|  )\s*((?:treadle|python -m treadle\S*) .*)", line)
        if hint is not None:
            yield hint[1].rstrip()
        yield from re.findall(r"`(treadle \w+ [^`]+)`", line)
        yield from re.findall(r"more: (treadle [^)]+)\)", line)


def _run(line: str, directory: Path) -> None:
    """Run a command as it is printed; one that finds something may exit with 1."""
    words = shlex.split(line.partition(" > ")[0])
    words = words[words.index("treadle") :] if words[0] == "torchrun" else words
    if any(" ".join(words).startswith(each) for each in NOT_RUN):
        make_command(words[1]).make_context(words[1], words[2:])
        return
    if words[:3] == ["python", "-m", "treadle.train"]:
        from treadle.train.command import parse_command

        with chdir(directory):
            assert parse_command(words[3:]).dry_run  # tests/train/test_planned.py trains such a plan
        return
    if words[1] == "plan" and "--pp" not in words:
        words += NARROWED.split()
    done = run(*words[1:], cwd=directory)
    assert done.returncode in ((0, 1) if words[1] in ("verify", "costs") else (0,)), f"$ {line}\n{done.stderr}"


@pytest.mark.slow
def test_suggested_commands_run(suggested: Suggested) -> None:
    for line in sorted(suggested.lines, key=lambda line: ("--fit" not in line, line)):  # files first
        _run(line, suggested.directory)


@pytest.mark.slow
def test_advice_on_a_cut_is_two_commands_that_run_one_after_the_other(suggested: Suggested) -> None:
    directory = suggested.directory
    for measured, sizes in {
        "'my profile'": "--pp 4",
        "torch": "--pp 4 --vpp 2",
        "'my v.json'": "--pp 4 --vpp 2 --placement v",
    }.items():
        told = run("why", *shlex.split(measured), cwd=directory).stdout
        fit, balance, found = (line.strip() for line in told.splitlines()[1:4])
        assert fit.startswith(("treadle import ", "treadle compare ")), told
        assert balance == f"treadle balance {sizes} --costs job.toml"
        (directory / "job.toml").unlink(missing_ok=True)
        for line in (fit, balance):
            done = run(*shlex.split(line)[1:], cwd=directory)
            assert done.returncode == 0, f"$ {line}\n{done.stderr}"
        layout = found.removeprefix("finds ").partition(": ")[0]
        assert done.stdout.splitlines()[-1] == f"balanced, as Megatron reads it: {layout}"


@pytest.mark.slow
def test_every_hint_is_among_them(suggested: Suggested) -> None:
    for path in sorted((SOURCES / "cli" / "commands").glob("*.py")):
        if path.stem == "selfcheck":  # NOT_RUN
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "suggest":
                last = node.end_lineno or node.lineno
                hit = any(file == str(path) and node.lineno <= line <= last for file, line in suggested.places)
                assert hit, f"{path}:{node.lineno}: no command of PRODUCERS brings this hint out"


def _examples() -> list[str]:
    texts = [about.examples for about in COMMANDS.values()]
    texts += [template for path, template in _templates() if path.parts[-2:] == ("commands", "costs.py")]
    texts += [template for path, template in _templates() if template.startswith("Start with: ")]
    lines = [line for text in texts for line in re.split(r"   \|   |, | or ", re.sub(r"^[\w ]+: ", "", text))]
    return [line for line in dict.fromkeys(lines) if line.startswith(("treadle", "torchrun")) and "\0" not in line]


@pytest.mark.slow
def test_examples_of_help_texts_run(directory: Path) -> None:
    for name, there in {"profile": "megatron", "timeline.json.gz": "megatron/timeline.json.gz"}.items():
        (directory / name).symlink_to(PROFILES / there)
    for path in sorted((PROFILES / "torch").glob("rank*")):
        (directory / path.name).symlink_to(path)
    (directory / "measured").mkdir()
    for name in ("predicted.json", "trace.json.gz", "measured/run.json"):
        assert run("simulate", "1f1b", "--pp", "4", "-m", "8", "-o", name, cwd=directory).returncode == 0
    for line in _examples():
        expanded = line.replace("rank*_trace.json.gz", " ".join(f"rank{rank}_trace.json.gz" for rank in range(4)))
        _run(expanded, directory)


@cache
def _templates() -> list[tuple[Path, str]]:
    """Every text of the sources that is not documentation; what is filled in is a zero."""
    found: list[tuple[Path, str]] = []
    for path in sorted(SOURCES.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        nodes = list(ast.walk(tree))
        documented = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        parts = {id(each) for node in nodes if isinstance(node, ast.JoinedStr) for each in node.values}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(each.value) if isinstance(each, ast.Constant) else "\0" for each in node.values)
                found.append((path, text))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented | parts:
                found.append((path, node.value))
    return found


@pytest.mark.slow
def test_every_command_in_a_text_was_run_or_is_a_mere_name(suggested: Suggested) -> None:
    ran = {*suggested.lines, *_examples(), *(each.example for each in CODES.values()), *MESSAGES}
    for path, template in _templates():
        if path.name == "output.py" or path.name.startswith("printed"):  # what JSON holds: no advice
            continue
        for found in _TREADLE.finditer(template):
            rest = template[found.end() :]
            if not rest.startswith((" ", "\0")):  # a name, in quotes or at the end
                continue
            begins = re.split(r"[\0`;)]|   \||, | or |' (?=\w)", template[found.start() :])[0].rstrip()
            where = f"{path.relative_to(ROOT)}: {template!r} suggests a command that no case here runs"
            assert any(begins in line for line in ran), where


IMPORT = "treadle import PROFILE --schedule ran.txt"
CSV = "treadle show 1f1b --pp 4 -m 8 --format torch-csv"
MESSAGES = {
    CSV: CSV,
    IMPORT: "treadle import 'my profile' --schedule ran.txt",
    "treadle plan --model NAME --cluster GPU:COUNT --files DIR": "treadle plan --model llama3-8b --cluster h100:8 "
    "--files costs --tp 2 --pp 2 --schedule 1f1b",
}
"""Commands of errors in Python, with what the reader fills in."""


@pytest.mark.slow
def test_commands_of_errors_in_python_run(directory: Path) -> None:
    imported = treadle.import_profile([directory / "my profile"])
    with pytest.raises(ValueError, match="verify the schedule that ran") as error:
        treadle.verify(imported.steps.trace())
    assert re.findall(r"'(treadle [^']+)'", str(error.value)) == [IMPORT]
    with pytest.raises(ValueError, match="is not a preset of costs") as error:
        treadle.load_costs("h100")
    (line,) = re.findall(r"'(treadle [^']+)'", str(error.value))
    treadle.save_trace(treadle.simulate(treadle.generate("1f1b", pp=2, microbatches=2), "unit"), directory / "t.json")
    with pytest.raises(ValueError, match=f"torch's runtime loads what '{CSV}' writes"):
        torch_pipelining.load_schedule(None, directory / "t.json")
    for command in (IMPORT, line, CSV):
        _run(MESSAGES[command], directory)


@pytest.mark.parametrize("code", [code for code, each in CODES.items() if each.example.startswith("treadle")])
def test_example_of_a_finding_finds_it(code: str) -> None:
    done = run(*shlex.split(CODES[code].example)[1:])
    assert (done.returncode, code in done.stdout) == (1, True), done.stdout
