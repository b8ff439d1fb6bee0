"""Predictions of published measurements stay as near as they are stated to be."""

from dataclasses import replace

import numpy as np
import pytest

from held_to import simumax_time, vtrain, zero_bubble
from held_to.rows import OFF, Prediction, misses_of, read_rows, spread


@pytest.mark.parametrize(("name", "number"), [("zero_bubble", 12), ("vtrain", 109), ("simumax", 43)])
def test_all_rows_are_there(name: str, number: int) -> None:
    assert len(read_rows(name)) == number


def test_errors_and_misses_of_predictions() -> None:
    rows = [Prediction("a", 100.0, 100.0), Prediction("b", 80.0, 100.0), Prediction("c", 130.0, 100.0)]
    assert spread(rows) == pytest.approx({"median": 0.2, "mean": 0.5 / 3, "p90": 0.3, "max": 0.3})
    found = misses_of(rows, lambda each: f"why {each.row}")
    assert [(each.row, each.cause) for each in found] == [("c", "why c"), ("b", "why b")]
    assert [each.error for each in found] == pytest.approx([0.3, -0.2])


class TestZeroBubble:
    plain = zero_bubble.Constants(spread=0, message_us=0, head=0, fused=1, optimizer_us=0, embedding_us=0)

    def setting(self) -> zero_bubble.Setting:
        measured = dict.fromkeys(zero_bubble.SCHEDULES, 1.0)
        # 14 layers on 8 stages: with a layer less on the first and the last, all 2 but those
        return zero_bubble.Setting("tiny", 14, 8192, 8, 2, 32, 100.0, 90.0, 60.0, 0.0, measured)

    def test_stages_have_the_published_mean(self) -> None:
        factors = self.setting().stage_factors(8, head=0.7)
        assert factors.mean() == pytest.approx(1)
        assert factors[0] < factors[-1] < factors[1]

    def test_1f1b_with_equal_stages_has_its_bubble(self) -> None:
        deep = replace(self.setting(), layers=8 * 10**6 - 2)
        assert zero_bubble.step_us(deep, "1f1b", self.plain) == pytest.approx((32 + 7) * 250, rel=1e-5)

    def test_1f1b_keeps_the_slowest_stages_pace(self) -> None:
        few, many = (replace(self.setting(), num_microbatches=number) for number in (32, 48))
        grown = zero_bubble.step_us(many, "1f1b", self.plain) - zero_bubble.step_us(few, "1f1b", self.plain)
        assert grown == pytest.approx(16 * 250 * few.stage_factors(8, head=0).max(), rel=1e-5)

    def test_zb_2p_has_no_bubble(self) -> None:
        setting = self.setting()
        slowest = setting.stage_factors(8, head=0).max()
        assert zero_bubble.step_us(setting, "zb_2p", self.plain) == pytest.approx(32 * 250 * slowest)

    def test_interleaved_has_a_share_of_the_bubble(self) -> None:
        setting = self.setting()
        steps = [zero_bubble.step_us(setting, name, self.plain) for name in ("zb_2p", "interleaved", "1f1b")]
        assert steps == sorted(steps)

    @pytest.mark.parametrize("constant", ["spread", "message_us", "fused", "optimizer_us", "embedding_us"])
    def test_each_constant_takes_time(self, constant: str) -> None:
        setting = replace(self.setting(), pp=16, layers=30)
        more = replace(self.plain, **{constant: getattr(self.plain, constant) + 2})
        before, after = (zero_bubble.step_us(setting, "1f1b", each) for each in (self.plain, more))
        assert after > before

    @pytest.mark.slow
    def test_throughputs(self) -> None:
        found = zero_bubble.predictions()
        assert len(found) == 18
        assert 100 * spread(found)["mean"] <= 1.0
        assert zero_bubble.rounding_floor() < spread(found)["mean"]
        assert spread(found)["max"] < OFF  # so there is nothing to explain


class TestVtrain:
    def test_constants_are_found_again(self) -> None:
        terms = np.array([run.terms() for run in vtrain.read_runs()])
        true = vtrain.PRIOR * np.array([0.8, 1.3, 1.5, 0.7, 1.4])
        seconds = terms @ true
        seconds[::11] *= 1.5  # rows off by far do not count for much
        assert vtrain.fit(terms, seconds) == pytest.approx(true, rel=0.03)

    def test_rows_that_are_predicted_were_not_fitted(self) -> None:
        for draw in vtrain.draws():
            assert len(draw) == 89

    def test_median(self) -> None:
        assert vtrain.run()["vtrain_median"] <= 5.0

    def test_rows_far_off_have_a_cause(self) -> None:
        found = vtrain.misses()
        assert all(abs(each.error) > OFF and each.cause for each in found)
        assert len(found) < 15


class TestSimumaxTime:
    def test_constants_are_found_again(self) -> None:
        cases = simumax_time.read_cases(simumax_time.FITTED)
        true = simumax_time.PRIOR * np.array([1.2, 0.9, 0.8, 1.4, 1.2, 1.5, 1.1, 0.9])
        made = [replace(case, measured=case.predict(true)) for case in cases]
        constants = simumax_time.fit(made)
        predicted = [case.predict(constants) for case in simumax_time.read_cases(simumax_time.HELD_OUT)]
        expected = [case.predict(true) for case in simumax_time.read_cases(simumax_time.HELD_OUT)]
        assert predicted == pytest.approx(expected, rel=0.02)

    def test_a_short_block_takes_what_the_host_takes(self) -> None:
        case = simumax_time.Case("one", "tiny", 3, ("t",), {"t": (np.array([1e-9, 0, 0, 0, 0]), 50.0)}, 0, 0, 1)
        assert case.predict(simumax_time.PRIOR) == pytest.approx(3 * 50 * 40e-6)

    def test_median(self) -> None:
        found = simumax_time.predictions()
        assert len(found) == 15
        assert 100 * spread(found)["median"] <= 3.5
        assert spread(found)["max"] < OFF  # so there is nothing to explain
