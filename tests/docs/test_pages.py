"""Every command and every piece of code of README and of the site, run as a reader would type them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import treadle
from docs.pages import DOCS, ROOT, blocks, pages, replay, run
from treadle.cli.app import COMMANDS, make_command
from treadle.schedules import SCHEDULES

QUICK = ("docs/own_schedule.md",)
"""Pages whose test is in the quick tier; the rest start processes or draw."""

ELSEWHERE = {
    "torchrun --nproc-per-node 2 examples/custom_schedule.py": "test_examples.py",
    "torchrun --nproc-per-node 4 examples/moe_layer.py": "test_examples.py",
    "torchrun --nproc-per-node 2 examples/rl_loop.py": "test_rl_loop.py",
    "torchrun --nproc-per-node 4 defer_pp_recv.py": "test_torch_defer.py",
    "torchrun --nproc-per-node 4 examples/train_and_serve.py": "test_train_and_serve.py",
}
"""Commands that another test of this folder runs, and looks at more closely."""

ONCE = {"torchrun --nproc-per-node 4 examples/any_model.py": "docs/run.md"}
"""Commands that several pages show and one runs."""

ON_RANKS = "torchrun --nproc-per-node 4 -m treadle.train "
"""So begin commands for ranks of the forkserver; in tests/train/test_faults.py torchrun itself starts the trainer."""

RUN = {"console", "python", "pycon"}
SHOWN = {"text", "toml"}
"""Languages of blocks: those that are run, and those that are only shown (or, with a title, written into a file)."""

NOT_RUN = {
    ("docs/offload.md", "a line of a training script"),
    ("docs/offload.md", "takes minutes"),
    ("docs/overlap.md", "takes minutes"),
    ("docs/own_schedule.md", "takes minutes, and the name is yours"),
    ("docs/run.md", "it is part of examples/any_model.py, which the command above runs"),
    ("docs/running_on_gpus.md", "takes minutes"),
    ("docs/scale.md", "takes minutes"),
    ("docs/scale.md", "takes minutes and gigabytes"),
    ("docs/synthesize.md", "takes minutes"),
    ("docs/torchtitan.md", "it is part of a training script"),
    ("docs/torchtitan.md", "needs torchtitan and GPUs"),
    ("docs/verl_sglang.md", "needs SGLang and GPUs"),
    ("docs/verl_sglang.md", "needs verl, which has an environment of its own"),
    ("docs/your_run.md", "it is part of a training script"),
    ("docs/your_run.md", "waits for files of a run in progress; tests/diagnosis/test_follow.py writes some meanwhile"),
    ("docs/weights_promise.md", "tests/update/test_leases.py has a fleet of six"),
    ("docs/vllm.md", "it is part of examples/vllm_serve.py"),
    ("docs/vllm.md", "needs vLLM, which has an environment of its own"),
    ("docs/vllm.md", "the test of it is tests/update/test_vllm_trainer.py"),
    ("docs/weights.md", "examples/rl_loop.py, above, is the whole of it"),
    ("docs/weights.md", "needs an engine in that directory; examples/vllm_serve.py is one"),
    ("docs/weights.md", "needs an engine in that directory; the test of it is in tests/cli/test_update.py"),
    ("docs/weights.md", "needs an engine and a trainer; the test of it is tests/update/test_agents.py"),
    ("docs/weights.md", "needs two hosts"),
    ("docs/weights.md", "the other half of it"),
    ("docs/weights.md", "the test of it is tests/update/test_separate_sets.py"),
}
"""Blocks that no test runs, by page and reason."""


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _cases() -> list[object]:
    names = sorted((_name(path) for path in pages()), key=lambda name: (name not in QUICK, name))
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("page", _cases())
def test_page_does_what_it_shows(page: str, tmp_path: Path) -> None:
    elsewhere = {*ELSEWHERE, *(command for command, runs in ONCE.items() if runs != page)}
    for ran in replay((ROOT / page).read_text("utf-8"), tmp_path, elsewhere, _run):
        assert ran.is_right, f"$ {ran.what}\n{ran.printed}"


def _run(line: str, directory: Path) -> tuple[int, str]:
    if line.startswith(ON_RANKS):
        from tests.support.torchrun import run_line  # torch, which few pages need

        return 0, run_line(line, directory)
    return run(line, directory)


def test_commands_that_another_test_runs_are_there() -> None:
    for command, test in ELSEWHERE.items():
        words = command.split()
        text = (Path(__file__).parent / test).read_text("utf-8")
        assert Path(words[-1]).name in text
        assert re.search(rf"torchrun\({words[2]}, |nproc-per-node={words[2]}", text), command


def test_blocks_that_no_test_runs_are_listed() -> None:
    found = {
        (_name(path), block.why_not) for path in pages() for block in blocks(path.read_text("utf-8")) if block.why_not
    }
    assert found == NOT_RUN


@pytest.mark.parametrize("path", pages(), ids=_name)
def test_every_block_has_a_language_and_no_code_is_indented(path: Path) -> None:
    text = path.read_text("utf-8")
    assert {block.language for block in blocks(text)} <= RUN | SHOWN
    assert text.count("```") == 2 * len(blocks(text))
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"\n\n    +\S.*", prose) == [], "fence it, so that it is run"


def test_picture_of_a_page_is_written_by_a_command_of_that_page() -> None:
    for path in pages():
        text = path.read_text("utf-8")
        made = {command.output for block in blocks(text) if block.language == "console" for command in block.commands()}
        for name in re.findall(r"\((?:\.\./)*made/([\w.-]+)\)", text):
            assert name in made, f"{_name(path)}: {name}"


def test_a_site_in_which_two_pages_write_one_picture_is_not_built(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mkdocs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text(f"site_name: it\nplugins: []\nhooks: [{DOCS / 'hooks.py'}]\n")
    shown = "```console\n$ printf 'text' > one.svg\n```\n\n![it](made/one.svg)\n"
    (tmp_path / "docs" / "index.md").write_text(shown)
    build(load_config(str(tmp_path / "mkdocs.yml")))
    assert (tmp_path / "site" / "made" / "one.svg").read_text() == "text"
    (tmp_path / "docs" / "other.md").write_text(shown)
    with pytest.raises(Abort):
        build(load_config(str(tmp_path / "mkdocs.yml")))
    assert "index.md and other.md both write made/one.svg" in caplog.text


def test_a_picture_is_shown_by_one_page() -> None:
    shown_by: dict[str, str] = {}
    for path in pages():
        for name in {*re.findall(r"\((?:\.\./)*made/([\w.-]+)\)", path.read_text("utf-8"))}:
            assert shown_by.setdefault(name, _name(path)) == _name(path), name


def test_python_api_has_every_public_name() -> None:
    text = (DOCS / "api.md").read_text("utf-8")
    shown = set(re.findall(r"^::: treadle\.(?:api\.\w+\.|planner\.find_)?(\w+)$", text, re.MULTILINE))
    assert shown >= set(treadle.__all__)


@pytest.mark.parametrize("path", pages(), ids=_name)
def test_names_of_a_pipeline_exist(path: Path) -> None:
    known = {*dir(treadle.Pipeline), "report"}
    assert {*re.findall(r"\bpipe\.(\w+)", path.read_text("utf-8"))} <= known


def test_models_to_take_as_they_are_have_a_model_type() -> None:
    from treadle.models.architectures import CLASSES

    (line,) = re.findall(
        r"^.*which you may take as they are:$", (DOCS / "your_model.md").read_text("utf-8"), re.MULTILINE
    )
    assert re.findall(r"`(\w+)`", line) == [*CLASSES]


def test_command_line_has_every_command() -> None:
    shown = set(re.findall(r"^<!-- help: treadle ([\w-]+) -->$", (DOCS / "cli.md").read_text("utf-8"), re.MULTILINE))
    listed = run("treadle --help", ROOT)[1].partition("Commands:")[2]
    assert shown == set(re.findall(r"^  ([\w-]+)  ", listed, re.MULTILINE))


@pytest.mark.parametrize("path", pages(), ids=_name)
def test_options_of_commands_in_sentences_exist(path: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for line in re.findall(r"`(treadle [a-z]+ [^`]+)`", prose):
        _, name, *words = line.split()
        assert name in COMMANDS, line
        command = make_command(name)
        known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
        for word in words if not hasattr(command, "commands") else ():
            assert not re.match(r"--?[a-z]", word) or word.partition("=")[0] in known | {"--help"}, line


def test_every_schedule_has_a_page_in_the_site() -> None:
    listed = (ROOT / "mkdocs.yml").read_text("utf-8")
    for name in SCHEDULES:
        assert (DOCS / "schedules" / f"{name}.md").is_file(), name
        assert f": schedules/{name}.md\n" in listed, name
