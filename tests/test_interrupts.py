"""When a signal is delivered, and when it waits."""

import os
import signal

import pytest

from qarl.interrupts import Interrupted, Interrupts


def test_a_signal_inside_an_allowed_block_raises_at_once() -> None:
    reached = []
    with Interrupts() as interrupts, pytest.raises(Interrupted):
        with interrupts.allowed():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("after")
    assert reached == []


def test_a_signal_outside_waits_for_the_next_allowed_block() -> None:
    announced: list[str] = []
    reached = []
    with Interrupts(announced.append) as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        reached.append("update finished")
        with pytest.raises(Interrupted), interrupts.allowed():
            reached.append("rollout begun")
    assert reached == ["update finished"]
    assert "again to quit" in announced[0]


def test_a_second_signal_does_not_wait_and_is_not_the_kind_that_saves() -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt) as caught:
            os.kill(os.getpid(), signal.SIGINT)
        assert not isinstance(caught.value, Interrupted)
        assert interrupts is not None


def test_a_signal_while_saving_after_an_interruption_waits() -> None:
    saved = []
    with Interrupts() as interrupts:
        try:
            with interrupts.allowed():
                os.kill(os.getpid(), signal.SIGINT)
        except Interrupted:
            os.kill(os.getpid(), signal.SIGTERM)
            saved.append("whole checkpoint")
    assert saved == ["whole checkpoint"]


def test_the_handlers_of_before_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
