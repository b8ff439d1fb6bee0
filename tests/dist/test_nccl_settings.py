"""The settings of torch's NCCL watchdog: which are refused, and in which words."""

from __future__ import annotations

import pytest

from treadle.dist.nccl_settings import NEEDED, refuse_wrong_settings, wrong_settings

HANDLING, MONITORING, BLOCKING = NEEDED


@pytest.mark.parametrize(
    "environment",
    [
        NEEDED,
        {HANDLING: "0", MONITORING: "false"},
        {"NCCL_ASYNC_ERROR_HANDLING": "0", MONITORING: "0"},
        {HANDLING: "0", "NCCL_ASYNC_ERROR_HANDLING": "3", MONITORING: "0"},
    ],
)
def test_settings_under_which_a_rank_can_raise_are_accepted(environment: dict[str, str]) -> None:
    assert wrong_settings(environment) == []
    refuse_wrong_settings(environment)


def test_an_environment_without_settings_is_refused_with_all_that_is_needed() -> None:
    with pytest.raises(ValueError, match="Give every rank") as error:
        refuse_wrong_settings({})
    text = str(error.value)
    assert f"{HANDLING} is not set, which means 3, and must be 0: else torch ends this process" in text
    assert f"{MONITORING} is not set, which means 1, and must be 0" in text
    assert f"{HANDLING}=0 {MONITORING}=0 {BLOCKING}=0 before init_process_group" in text


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({**NEEDED, HANDLING: "1"}, f"{HANDLING} is '1', and must be 0"),
        ({MONITORING: "0", "NCCL_ASYNC_ERROR_HANDLING": "2"}, "NCCL_ASYNC_ERROR_HANDLING is '2', and must be 0"),
        ({**NEEDED, BLOCKING: "1"}, f"{BLOCKING} is '1', and must be 0: else every wait stops the thread"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(environment: dict[str, str], told: str) -> None:
    (text,) = wrong_settings(environment)
    assert text.startswith(told)
