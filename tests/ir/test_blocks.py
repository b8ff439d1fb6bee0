"""Layout strings mean what Megatron's own parser says; what stands where it cannot is refused by its place."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.ir.blocks import MOST_LETTERS, check_blocks, parse_layout, with_dense, write_layout

LETTER_OF = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


@cache
def megatron_parser() -> Any:
    """Imported by the tests that ask it: that takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it misses Apex and Transformer Engine, which layouts do not need
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    return PipelineParallelLayerLayout


def megatron_reads(text: str) -> tuple[str, ...]:
    stages = megatron_parser().parse_str_to_list(text)
    return tuple("".join(LETTER_OF[layer.name] for layer in stage) for stage in stages)


PUBLISHED = {
    "Et|(tt|)*30L": ("Et", *["tt"] * 30, "L"),
    "Et*4|(tttt|)*14tmL": ("Etttt", *["tttt"] * 14, "tmL"),
    "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL": ("Ett", *["tt"] * 34, "ttt", *["tt"] * 3, "tL"),
    "Et*3|(tt|)*29m|L": ("Ettt", *["tt"] * 29, "m", "L"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "blocks"), PUBLISHED.items())
def test_published_layouts(text: str, blocks: tuple[str, ...]) -> None:
    assert parse_layout(text) == megatron_reads(text) == blocks
    check_blocks(blocks)


def test_layouts_are_written_short() -> None:
    written = [write_layout(blocks) for blocks in PUBLISHED.values()]
    assert written == ["Et|(tt|)*30L", "Et*4|(t*4|)*14tmL", "Ett|(tt|)*34ttt|(tt|)*3tL", "Ettt|(tt|)*29m|L"]


ITEM = st.builds(lambda letter, times: letter + times, st.sampled_from("EtmL|"), st.sampled_from(("", "", "*2", "*13")))
ITEMS = st.lists(ITEM, min_size=1, max_size=5).map("".join)
GROUP = st.builds(lambda inside, times: f"({inside})*{times}", ITEMS, st.integers(0, 12))
LAYOUT = st.lists(ITEMS | GROUP | st.just(","), max_size=6).map("".join)


@pytest.mark.slow
@given(LAYOUT)
def test_any_text_is_read_as_megatron_reads_it(text: str) -> None:
    """Megatron has empty stages, Treadle has none."""
    expected = megatron_reads(text)
    if all(expected) and "|*" not in text:
        assert parse_layout(text) == expected
    else:
        with pytest.raises(ValueError, match=r"stage \d+ is empty|empty stages"):
            parse_layout(text)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.text(st.sampled_from("Etm|()*,2"), max_size=12))
def test_what_is_read_at_all_is_what_megatron_reads(text: str) -> None:
    try:
        blocks = parse_layout(text)
    except ValueError:
        return
    assert megatron_reads(text) == blocks


STAGES = st.lists(st.tuples(st.text("EtdmL", min_size=1, max_size=9), st.integers(1, 5)), min_size=1, max_size=8).map(
    lambda runs: tuple(stage for stage, times in runs for _ in range(times))
)


@pytest.mark.slow
@given(STAGES)
def test_what_is_written_is_read_back(blocks: tuple[str, ...]) -> None:
    without_dense = tuple(stage.replace("d", "t") for stage in blocks)
    text = write_layout(blocks)
    assert megatron_reads(text) == parse_layout(text) == without_dense
    assert parse_layout(write_layout(blocks, dense=True)) == blocks
    assert len(text) <= len("|".join(blocks))


@pytest.mark.parametrize(
    ("text", "character", "message"),
    [
        ("", 1, "stage 0 is empty"),
        ("Et||tL", 4, "stage 1 is empty; give it a block or leave out a '|'"),
        ("Et|(tt|)*3", 11, "stage 4 is empty"),
        ("Et, x", 5, "'x' is not a block; blocks are E (embedding), t (layer)"),
        ("Et|*2tL", 3, "a repeated '|' makes empty stages"),
        ("Et|(tt|*3", 7, "a repeated '|' makes empty stages"),
        ("Et|(tt|tL", 4, "never closed"),
        ("Et|()*3tL", 4, "nothing between the parentheses"),
        ("Et|(tt|) tL", 10, "how often the group stands is missing"),
        ("Et|((tt|)*2t|)*2L", 5, "a group cannot stand in a group"),
        ("Et*", 4, "a number belongs after '*'"),
        ("Et*2*3", 5, "a repeat cannot be repeated"),
        ("*2", 1, "'*' and ')' belong after a block"),
        ("Et)", 3, "'*' and ')' belong after a block"),
        ("Et*1000000", 3, f"more than {MOST_LETTERS} letters"),
        ("Et*100000", 2, f"more than {MOST_LETTERS} letters"),
        ("E(t*1000|)*1000L", 2, f"more than {MOST_LETTERS} letters"),
        ("E" + "t" * 150 + "xL", 152, "'x' is not a block"),
    ],
)
def test_an_error_points_at_its_place(text: str, character: int, message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the whole message is looked at
        parse_layout(text)
    said, shown, caret = str(raised.value).split("\n")
    assert said.startswith(f"layout, character {character}: ")
    assert message in said
    assert (shown + " ")[len(caret) - 1] == (text + " ")[character - 1]


def test_dense_layers_come_first() -> None:
    blocks = parse_layout("Et|(tt|)*2mL")
    assert with_dense(blocks, 0) == blocks
    assert with_dense(blocks, 2) == ("Ed", "dt", "tt", "mL")
    assert with_dense(blocks, 5) == ("Ed", "dd", "dd", "mL")
    assert write_layout(with_dense(blocks, 2)) == "Et|tt|tt|mL"
    for count in (-1, 6):
        with pytest.raises(ValueError, match=rf"0 to 5 of the layout's 5 layers can be dense, got {count}"):
            with_dense(blocks, count)


def test_stages_without_layers_are_stages() -> None:
    for text in ("EL", "E|L", "E|tt|mL", "Et|t|m|L", "Ed|tmm|L"):
        check_blocks(parse_layout(text))


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ((), "at least one stage, got none"),
        (("Et", "", "tL"), "stage 1: a stage has at least one block, got none"),
        (("Et", "txt", "tL"), "stage 1: 'x' in 'txt' is not a block; blocks are E"),
        (("t", "tL"), "stage 0: the first block is E, the embedding, got 't'; write 'Et'"),
        (("Et", "tt"), "stage 1: the last block is L, the head with its loss, got 'tt'; write 'ttL'"),
        (("Et", "Et", "tL"), "stage 1: E stands once, as the first block of stage 0, got another in 'Et'"),
        (("EE", "tL"), "stage 0: E stands once"),
        (("Et", "tL", "tL"), "stage 1: L stands once, as the last block of stage 2, got another in 'tL'"),
        (("Et", "tLL"), "stage 1: L stands once"),
        (("Etm", "tL"), "stage 1: layers stand before the MTP blocks, got t in 'tL' after the m of stage 0"),
    ],
)
def test_what_stands_where_it_cannot_is_refused(blocks: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the whole message is looked at
        check_blocks(blocks)
    assert message in str(raised.value)


@pytest.mark.slow
@given(STAGES)
def test_checked_blocks_are_valid_for_megatron(blocks: tuple[str, ...]) -> None:
    """On one rank for each stage. Megatron besides wants all MTP blocks in one stage."""
    try:
        check_blocks(blocks)
    except ValueError:
        checked = False
    else:
        checked = True
    text = write_layout(blocks)
    layout = megatron_parser()(text, len(blocks))
    together = sum("m" in stage for stage in blocks) <= 1
    count = "".join(megatron_reads(text)).count
    try:
        layout.validate_layer_layout(count("t"), count("m"))
    except AssertionError:
        assert not checked or not together
    else:
        assert checked
