"""`treadle dryrun`: a rank of a big world, without the machines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import treadle
from tests.support.json_output import read_json
from treadle.cli.app import app
from treadle.ir.ops import LaneKind
from treadle.lowering.running import disagreements, expected, host_order, lower_running
from treadle.passes.mesh import spread
from treadle.runtime.rank_dryrun import Rehearsal, Sent, Toy, differences, rehearse

WORLD, PP, MB = 256, 8, 16
SMALL = Toy(width=64, layers=2, tokens=128)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe", "interleaved-overlap"])
def test_each_place_of_a_world_of_256_does_what_was_verified(name: str) -> None:
    schedule = treadle.generate(name, pp=PP, microbatches=MB)
    for place in range(PP):
        rank = place * (WORLD // PP) + (7 * place) % (WORLD // PP)
        done = rehearse(schedule, WORLD, rank, SMALL)
        assert (done.pp_rank, done.dp_rank) == (place, (7 * place) % (WORLD // PP))
        assert differences(done) == []
        assert done.num_communicators <= 8
        assert done.groups == {"pipe": PP, **({"copies": 64} if name == "dualpipe" else {"replicas": 32})}
    assert disagreements(spread(done.program, ep=1, dp=WORLD // PP)) == []


@pytest.mark.slow
def test_memory_is_counted_from_the_step() -> None:
    """1f1b: a place holds as many micro-batches as the pipe is long behind it, and two receive buffers a channel."""
    schedule = treadle.generate("1f1b", pp=PP, microbatches=MB)
    first, last = (rehearse(schedule, PP, rank, SMALL) for rank in (0, PP - 1))
    message = SMALL.boundary[0].size_bytes
    one = last.peak_saved_bytes
    assert first.peak_saved_bytes > (PP - 1) * one * 0.9
    assert last.peak_buffer_bytes == 2 * message
    longer = rehearse(treadle.generate("1f1b", pp=PP, microbatches=4 * MB), PP, 3, SMALL)
    shorter = rehearse(schedule, PP, 3, SMALL)
    assert longer.peak_buffer_bytes == shorter.peak_buffer_bytes
    assert longer.peak_saved_bytes == shorter.peak_saved_bytes


def test_the_peak_is_of_all_tensors() -> None:
    """Of one rank in a backward: parameters, gradients, saved tensors, the batch, and what the backward makes."""
    done = rehearse(treadle.generate("1f1b", pp=1, microbatches=2), 1, 0, SMALL)
    microbatch = SMALL.boundary[0].size_bytes
    held = done.parameter_bytes + done.gradient_bytes + done.peak_saved_bytes + microbatch  # another is saved
    assert held < done.peak_bytes < held + 2 * done.peak_saved_bytes
    assert done.peak_at == "B1.0"
    more = rehearse(treadle.generate("1f1b", pp=1, microbatches=6), 1, 0, SMALL)
    assert more.peak_bytes - done.peak_bytes == 4 * (microbatch + 4)  # and the losses


def test_a_difference_is_told() -> None:
    done = rehearse(treadle.generate("1f1b", pp=2, microbatches=4), 2, 0, SMALL)
    less: Rehearsal = replace(done, channels={**done.channels, (0, 1): Sent(3, 0)})
    assert differences(less) == ["channel 0>1: 4 messages in the program, 3 in the step"]


def test_lists_that_disagree_are_found() -> None:
    program = lower_running(treadle.generate("zb-v", pp=4, microbatches=8), reduce=True)
    assert disagreements(program) == []
    sends = np.flatnonzero(program.lane_kind[program.lane_of] == LaneKind.SEND)[:2]
    mb = program.mb.copy()
    mb[sends] = mb[sends[::-1]]
    crossed = disagreements(replace(program, mb=mb))
    assert len(crossed) == 2
    assert "goes together with" in crossed[0]


def test_every_list_has_the_ranks_own_ops_once() -> None:
    program = lower_running(treadle.generate("dualpipe", pp=4, microbatches=12), reduce=True)
    lists = host_order(program, expected(program))
    assert np.array_equal(np.sort(np.concatenate(lists)), np.arange(program.num_ops))


def test_the_command() -> None:
    size = ["--pp", "4", "-m", "8", "--world", "64", "--rank", "21", "--width", "64", "--tokens", "16"]
    result = CliRunner().invoke(app, ["dryrun", "dualpipe", *size])
    assert result.exit_code == 0, result.output
    assert "rank 21 of 64: place 1 along pp, 5 along dp" in result.output
    assert "6: 4 channels, pipe of 4, copies of 32" in result.output
    told = read_json("dryrun", CliRunner().invoke(app, ["dryrun", "dualpipe", *size, "--json"]).stdout)
    assert told["communicators"] == 6
    assert f"at {told['peak_at']}" in result.output
    assert told["disagreements"] == []
    assert told["channels"]["1>2"]["messages"] == 8


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--world", "10"], "fill a world of 4, 8, ... ranks, got 10"),
        (["--world", "8", "--rank", "8"], "has the ranks 0 to 7, got 8"),
        (["--width", "0"], "--width is a whole number from 1, got 0"),
    ],
)
def test_refusals(given: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["dryrun", "1f1b", "--pp", "4", "-m", "8", *given])
    assert result.exit_code != 0
    assert said in str(result.exception)
