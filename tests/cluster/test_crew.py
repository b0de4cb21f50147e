"""Orders and answers, errors in their own words, and orders that a signal cuts short."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from qarl.cluster.crew import STOP, Crew, Fault, own_device
from qarl.errors import ConfigurationError, RunError
from qarl.interrupts import Interrupted


def obey(crew: Crew) -> list[str]:
    """A follower that knows four orders; returns what it was told."""
    told = []
    while True:
        name, arguments = crew.next_order()
        told.append(name)
        if name == STOP:
            return told
        if name == "double":
            crew.answer(2 * arguments[0])
        elif name == "fail":
            crew.answer(Fault.of(arguments[0]))
        elif name == "work":
            started = time.monotonic()
            while not crew.is_called_off():
                time.sleep(0.01)
            crew.answer(time.monotonic() - started)
        elif name == "slow":
            time.sleep(arguments[0])
            crew.answer("at last")


def asked(crew: Crew) -> Any:
    if not crew.leads:
        return obey(crew)
    found = []
    for value in (3, "ab", [1] * 100_000):
        with crew.order("double", value) as answers:
            pass
        found.append(answers)
    crew.dismiss()
    return found


def test_an_order_is_answered_by_every_follower(pair) -> None:
    found, told = pair(asked)
    assert found == [[6], ["abab"], [[1] * 200_000]]
    assert told == ["double", "double", "double", STOP]


def failing(crew: Crew, error: Exception) -> Any:
    if not crew.leads:
        return obey(crew)
    try:
        with crew.order("fail", error):
            pass
    except (ConfigurationError, RunError) as raised:
        found = type(raised).__name__, str(raised)
    with crew.order("double", 1) as answers:  # all are in step still
        pass
    crew.dismiss()
    return found, answers


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RunError("prompt 7: overflow"), ("RunError", "prompt 7: overflow")),
        (ConfigurationError("too long"), ("ConfigurationError", "too long")),
        (ValueError("odd"), ("RunError", "ValueError: odd")),
    ],
)
def test_a_followers_error_is_raised_by_the_leader_in_its_words(pair, error: Exception, told: tuple[str, str]) -> None:
    assert pair(failing, error)[0] == (told, [2])


def called_off(crew: Crew, error: Exception) -> Any:
    if not crew.leads:
        return obey(crew)
    try:
        with crew.order("work"):
            raise error
    except Exception as raised:
        found: BaseException = raised
    except Interrupted as raised:
        found = raised
    with crew.order("double", 1) as answers:
        pass
    crew.dismiss()
    return str(found), answers


@pytest.mark.parametrize("error", [Interrupted("a signal"), RunError("mine")])
def test_what_ends_the_leaders_part_early_ends_the_others_and_they_stay_in_step(pair, error) -> None:
    assert pair(called_off, error)[0] == (str(error), [2])


def cut_short(crew: Crew) -> Any:
    """A signal comes while the leader waits for answers, having done its own part."""
    import signal

    if not crew.leads:
        return obey(crew)

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted("a signal")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with crew.order("slow", 0.6):
            pass
        found = "not interrupted"
    except Interrupted as raised:
        found = str(raised)
    finally:
        signal.signal(signal.SIGALRM, before)
    with crew.order("double", 1) as answers:
        pass
    crew.dismiss()
    return found, answers


def test_a_signal_while_answers_are_waited_for_leaves_all_in_step(pair) -> None:
    assert pair(cut_short)[0] == ("a signal", [2])


def patient(crew: Crew) -> Any:
    """A follower is silent for longer than is allowed, but for its pulse."""
    if not crew.leads:
        return obey(crew)
    before, crew.patience_s = crew.patience_s, 1.0
    with crew.order("slow", 2.0) as answers:
        pass
    crew.patience_s = before
    crew.dismiss()
    return answers


def test_one_who_works_for_long_is_waited_for(pair) -> None:
    assert pair(patient)[0] == ["at last"]


def test_an_error_of_ours_is_told_with_its_kind_and_place() -> None:
    assert Fault.of(KeyError("x"), "rank 1: ") == Fault("RunError", "rank 1: KeyError: 'x'")
    assert str(Fault.of(RunError("full"), "rank 2: ").error()) == "rank 2: full"


def test_every_rank_of_a_machine_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_device(torch.device("cuda")) == torch.device("cuda", 1) and chosen == [1]
    assert own_device(torch.device("cpu")) == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigurationError, match="torch sees 2 for the 3 or more ranks"):
        own_device(torch.device("cuda"))
    assert chosen == [1]
