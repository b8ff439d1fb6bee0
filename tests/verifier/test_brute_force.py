"""The oracle itself, on schedules small enough to be worked out by hand from docs/reference/semantics.md."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.support.brute_force import execute
from treadle.ir import Action, B, Cell, Channel, F, I, Placement, Schedule, W
from treadle.schedules import SCHEDULES, generate

LINE = Placement.loop(2)
V = Placement.v(2)
BOTH_ENDS = Placement.bidirectional(2)


def schedule(
    *rows: list[Cell],
    mbs: int = 1,
    placement: Placement = LINE,
    receives: Mapping[Channel, tuple[Action, ...]] | None = None,
) -> Schedule:
    return Schedule("by hand", placement, mbs, tuple(map(tuple, rows)), receives or {})


def symptoms(made: Schedule, *, ring: int | None = None, receives: str = "sender") -> set[str]:
    """The symptoms, after a check that eager sends do not change them (see test_eager_sends_...)."""
    outcome = execute(made, ring=ring, receives=receives)
    assert execute(made, eager=True, ring=ring, receives=receives).symptoms == outcome.symptoms
    assert outcome.clean == (not outcome.symptoms)
    assert bool(outcome.stuck) == ("hang" in outcome.symptoms)
    return set(outcome.symptoms)


ONE = schedule([F(0), B(0)], [F(0), B(0)])
ONE_F_ONE_B = schedule([F(0), F(1), B(0), B(1)], [F(0), B(0), F(1), B(1)], mbs=2)
# rank 1 takes the micro-batches in the other order than rank 0 sends them
TURNED = schedule([F(0), F(1), B(0), B(1)], [F(1), F(0), B(1), B(0)], mbs=2)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("order", ["sender", "use"])
@pytest.mark.parametrize("ring", [None, 1, 2])
def test_clean(eager: bool, order: str, ring: int | None) -> None:
    for made in (ONE, ONE_F_ONE_B):
        outcome = execute(made, eager=eager, ring=ring, receives=order)
        assert outcome.clean
        assert outcome.stuck == ()


def test_other_orders_of_receives_are_refused() -> None:
    with pytest.raises(ValueError, match="'sender' or 'use'"):
        execute(ONE, receives="random")


def test_one_rank_has_no_messages() -> None:
    placement = Placement.loop(1, 2)
    assert symptoms(schedule([F(0, 0), F(0, 1), B(0, 1), B(0, 0)], placement=placement)) == set()
    assert symptoms(schedule([F(0, 1), F(0, 0), B(0, 1), B(0, 0)], placement=placement)) == {"hang"}
    assert symptoms(schedule([F(0, 0), F(0, 1), B(0, 0), B(0, 1)], placement=placement)) == {"hang"}


def test_backward_before_forward() -> None:
    outcome = execute(schedule([F(0), B(0)], [B(0), F(0)]))
    assert outcome.symptoms == {"hang"}
    # rank 0 runs F0 and rank 1 gets its message; nothing else can happen
    assert outcome.stuck == (
        "rank 0: B0.0",
        "rank 1: B0.0",
        "rank 1: F0.0",
        "1->0: send B0.0",
        "1->0: receive B0.0",
    )
    assert symptoms(schedule([B(0), F(0)], [F(0), B(0)])) == {"hang"}


def test_weight_half_before_input_half() -> None:
    assert symptoms(schedule([F(0), I(0), W(0)], [F(0), I(0), W(0)])) == set()
    assert symptoms(schedule([F(0), W(0), I(0)], [F(0), I(0), W(0)])) == {"hang"}


def test_a_gradient_is_one_name_for_whole_and_split_backwards() -> None:
    assert symptoms(schedule([F(0), B(0)], [F(0), I(0), W(0)])) == set()
    assert symptoms(schedule([F(0), I(0), W(0)], [F(0), B(0)])) == set()


def test_pair() -> None:
    outcome = execute(schedule([F(0), F(1), B(0), B(1)], [F(0), F(1) | B(0), B(1)], mbs=2))
    assert outcome.clean
    assert outcome.peak == (2, 2)


def test_pair_whose_halves_depend_on_each_other() -> None:
    outcome = execute(schedule([F(0), B(0)], [F(0) | B(0)]))
    assert outcome.symptoms == {"hang"}
    assert "rank 1: (F0.0|B0.0)" in outcome.stuck


def test_pair_whose_halves_depend_on_each_other_by_way_of_another_rank() -> None:
    row: list[Cell] = [F(0), F(1) | B(0), B(1)]
    assert symptoms(schedule(row, [F(0), B(0), F(1), B(1)], mbs=2)) == set()
    assert symptoms(schedule(row, [F(0), F(1), B(0), B(1)], mbs=2)) == {"hang"}


def test_pair_needs_the_first_forward_of_its_row() -> None:
    """The pair's backward needs the F before it, not the one beside it: it runs, but F is double."""
    made = schedule([F(0), F(0), B(0)], [F(0), F(0) | B(0)])
    assert symptoms(made) == {"double"}


def test_dropped_forward_of_the_sender() -> None:
    outcome = execute(schedule([B(0)], [F(0), B(0)]))
    assert outcome.symptoms == {"missing", "hang"}
    assert "0->1: receive F0.0" in outcome.stuck
    assert symptoms(schedule([B(0)], [F(0), B(0)])) == {"missing", "hang"}


def test_dropped_forward_of_the_receiver() -> None:
    made = schedule([F(0), B(0)], [B(0)])
    assert symptoms(made) == {"missing", "hang"}
    assert "0->1: send F0.0" in execute(made).stuck
    assert "0->1: message F0.0" in execute(made, eager=True).stuck


def test_a_dropped_receive_makes_the_next_one_get_its_message() -> None:
    made = schedule([F(0), F(1), B(0), B(1)], [F(1), B(1)], mbs=2)
    # 0->1 sends F0 F1 and receives F1; 1->0 sends B1 and receives B1 B0, in the sender's order
    assert symptoms(made) == {"missing", "hang", "wrong data"}


def test_dropped_weight_half_is_missed_by_nobody() -> None:
    assert symptoms(schedule([F(0), I(0)], [F(0), B(0)])) == {"missing"}


def test_dropped_input_half() -> None:
    assert symptoms(schedule([F(0), W(0)], [F(0), B(0)])) == {"missing", "hang"}


def test_doubled_forward() -> None:
    made = schedule([F(0), F(0), B(0)], [F(0), B(0)])
    assert symptoms(made) == {"double", "hang"}
    assert execute(made).stuck == ("0->1: send F0.0",)
    assert execute(made, eager=True).stuck == ("0->1: message F0.0",)


def test_doubled_on_both_ends_runs_through() -> None:
    assert symptoms(schedule([F(0), F(0), B(0)], [F(0), F(0), B(0)])) == {"double"}


def test_doubled_receive_has_no_match() -> None:
    made = schedule([F(0), B(0)], [F(0), B(0), F(0)])
    assert symptoms(made) == {"double", "hang"}
    assert execute(made).stuck == ("rank 1: F0.0", "0->1: receive F0.0")


def test_doubled_weight_half() -> None:
    assert symptoms(schedule([F(0), I(0), W(0), W(0)], [F(0), B(0)])) == {"double"}


def test_whole_backward_beside_a_half() -> None:
    # B and I read the same name: the first gradient goes to B, the second to I
    made = schedule([F(0), B(0), I(0), W(0)], [F(0), I(0), I(0), W(0)])
    assert symptoms(made) == {"double"}
    # W needs I, and B does not stand in for it
    assert symptoms(schedule([F(0), B(0), W(0)], [F(0), B(0)])) == {"double", "hang"}


@pytest.mark.parametrize("odd", [F(1), F(-1), F(0, 1), F(0, -1), B(7), I(7), W(7)])
def test_unknown(odd: Action) -> None:
    for place in range(3):
        row: list[Cell] = [F(0), B(0)]
        row.insert(place, odd)
        assert symptoms(schedule(row, [F(0), B(0)])) == {"unknown"}


def test_unknown_takes_its_place_on_its_lane() -> None:
    outcome = execute(schedule([B(0), F(7), F(0)], [F(0), B(0)]))
    assert outcome.symptoms == {"unknown", "hang"}
    assert "rank 0: F7.0" in outcome.stuck


def test_unknown_half_of_a_pair() -> None:
    assert symptoms(schedule([F(0), F(7) | B(0)], [F(0), B(0)])) == {"unknown"}


SWAPPED = {(0, 1): (F(1), F(0))}


def test_swapped_receives_cross() -> None:
    made = schedule(*map(list, ONE_F_ONE_B.rows), mbs=2, receives=SWAPPED)
    assert symptoms(made) == {"wrong data"}


def test_swapped_receives_cross_even_if_no_reader_runs() -> None:
    made = schedule([F(0), F(1), B(0), B(1)], [B(0), F(0), F(1), B(1)], mbs=2, receives=SWAPPED)
    assert symptoms(made) == {"wrong data", "hang"}


def test_crossing_that_is_never_delivered_is_a_hang_only() -> None:
    made = schedule([B(0), F(0), F(1), B(1)], [F(0), F(1), B(0), B(1)], mbs=2, receives=SWAPPED)
    assert symptoms(made) == {"hang"}


def test_receives_in_order_of_use_cross_where_the_sender_has_another() -> None:
    assert symptoms(TURNED) == set()
    assert symptoms(TURNED, receives="use") == {"wrong data"}


def test_receives_that_the_schedule_gives_win() -> None:
    given = {(0, 1): (F(0), F(1)), (1, 0): (B(1), B(0))}
    made = schedule(*map(list, TURNED.rows), mbs=2, receives=given)
    assert symptoms(made, receives="use") == set()
    only_there = schedule(*map(list, TURNED.rows), mbs=2, receives={(0, 1): given[0, 1]})
    assert symptoms(only_there, receives="use") == {"wrong data"}


def test_receives_that_lack_a_message_leave_its_reader_and_its_send_waiting() -> None:
    assert symptoms(schedule([F(0), B(0)], [F(0), B(0)], receives={(0, 1): ()})) == {"hang"}


def test_receives_that_have_a_message_too_many_wait_for_it() -> None:
    made = schedule([F(0), B(0)], [F(0), B(0)], receives={(0, 1): (F(0), F(0))})
    assert symptoms(made) == {"hang"}
    assert execute(made).stuck == ("0->1: receive F0.0",)


def test_ring_of_one_that_deadlocks() -> None:
    """F0's message holds the only buffer until F0 runs, and F1, which is before it, has no buffer."""
    assert symptoms(TURNED, ring=1) == {"hang"}
    assert symptoms(TURNED, ring=2) == set()
    assert execute(TURNED, ring=1).stuck[:2] == ("rank 0: B0.0", "rank 0: B1.0")


def test_ring_does_not_wait_for_a_receive_that_nobody_reads() -> None:
    """Rank 1 lacks F0 and F1 is there twice, but the receives it was given are those of F0 and F1.

    Nobody reads F0's, so its buffer is free for F1's; the second F1 has no receive and never starts.
    """
    rows: tuple[list[Cell], list[Cell]] = ([F(0), F(1), B(0), B(1)], [F(1), F(1), B(1)])
    made = schedule(*rows, mbs=2, receives={(0, 1): (F(0), F(1))})
    assert symptoms(made, ring=1) == {"missing", "double", "hang"}
    assert execute(made, ring=1).stuck[2:4] == ("rank 1: F1.0", "rank 1: B1.0")


def test_eager_sends_change_what_is_stuck_but_not_the_symptoms() -> None:
    """Only later sends of its lane wait for a send, and their receives wait in the same order anyway."""
    rows: tuple[list[Cell], list[Cell]] = ([F(0), F(1), B(0), B(1)], [F(1), F(0), B(1), B(0)])
    made = schedule(*rows, mbs=2)
    late, early = execute(made, ring=1), execute(made, ring=1, eager=True)
    assert late.symptoms == early.symptoms == {"hang"}
    assert "0->1: send F1.0" in late.stuck
    assert "0->1: send F1.0" not in early.stuck
    assert "0->1: message F1.0" in early.stuck


def test_v() -> None:
    row: list[Cell] = [F(0, 0), F(0, 1), B(0, 1), B(0, 0)]
    outcome = execute(schedule(row, row, placement=V))
    assert outcome.clean
    assert outcome.peak == (2, 2)


def test_v_turns_on_its_last_rank_without_a_message() -> None:
    down: list[Cell] = [F(0, 0), F(0, 1), B(0, 1), B(0, 0)]
    outcome = execute(schedule(down, [F(0, 1), F(0, 0), B(0, 1), B(0, 0)], placement=V))
    assert outcome.symptoms == {"hang"}
    assert not [text for text in outcome.stuck if "receive F0.1" in text and text.startswith("0->1")]
    # 0->1 now sends F0.0 and B0.1, and receives B0.1 only
    dropped = schedule(down, [F(0, 1), B(0, 1), B(0, 0)], placement=V)
    assert symptoms(dropped) == {"missing", "hang", "wrong data"}


def test_both_ends() -> None:
    rows: tuple[list[Cell], list[Cell]] = (
        [F(0, 0), F(0, 1), B(0, 1), B(0, 0)],
        [F(0, 1), F(0, 0), B(0, 0), B(0, 1)],
    )
    outcome = execute(schedule(*rows, mbs=2, placement=BOTH_ENDS))
    assert outcome.clean
    assert outcome.peak == (2, 2)


def test_both_ends_wait_for_each_other() -> None:
    rows: tuple[list[Cell], list[Cell]] = (
        [F(0, 1), F(0, 0), B(0, 1), B(0, 0)],
        [F(0, 0), F(0, 1), B(0, 0), B(0, 1)],
    )
    assert symptoms(schedule(*rows, mbs=2, placement=BOTH_ENDS)) == {"hang"}


def test_each_end_has_half_of_the_microbatches() -> None:
    rows: tuple[list[Cell], list[Cell]] = (
        [F(0, 0), F(0, 1), B(0, 1), B(0, 0), F(1, 0)],
        [F(0, 1), F(0, 0), B(0, 0), B(0, 1)],
    )
    assert symptoms(schedule(*rows, mbs=2, placement=BOTH_ENDS)) == {"unknown"}


def test_peak() -> None:
    assert execute(ONE).peak == (1, 1)
    assert execute(ONE_F_ONE_B).peak == (2, 1)
    split: list[Cell] = [F(0), I(0), F(1), W(0), I(1), W(1)]
    assert execute(schedule([F(0), F(1), B(0), B(1)], split, mbs=2)).peak == (2, 2)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("rounds", [2, 3, 4])
def test_generated_schedules_are_clean(name: str, pp: int, rounds: int) -> None:
    made = generate(name, pp=pp, microbatches=rounds * pp)
    for eager in (False, True):
        outcome = execute(made, eager=eager)
        assert outcome.symptoms == frozenset()
        assert outcome.stuck == ()


@pytest.mark.parametrize(("name", "pp"), [("zb-v", 4), ("dualpipe", 6), ("dualpipev", 4)])
def test_generated_schedules_that_cross_where_receives_are_in_order_of_use(name: str, pp: int) -> None:
    assert symptoms(generate(name, pp=pp, microbatches=2 * pp), receives="use") == {"wrong data"}


@pytest.mark.parametrize("pp", [2, 4])
def test_small_dualpipe_uses_in_the_order_it_sends(pp: int) -> None:
    assert symptoms(generate("dualpipe", pp=pp, microbatches=2 * pp), receives="use") == set()
