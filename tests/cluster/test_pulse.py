"""Who beats is alive, and who does not is told apart from those who do."""

from __future__ import annotations

import time

from torch.distributed import HashStore

from qarl.cluster.pulse import Pulse


def test_a_rank_that_beats_no_more_is_missing() -> None:
    store = HashStore()
    here, there = Pulse(store, 0, 3, timeout_s=0.5), Pulse(store, 1, 3, timeout_s=0.5)
    try:
        assert here.beat_s == 0.1
        assert here.missing() == [2]  # which has never been there
        there.leave_word("out of memory")
        there.end()
        assert here.missing() == [1, 2]
        assert here.silent_for([1]) < here.silent_for([1, 2])
        assert here.word == "out of memory"
    finally:
        here.end()


def test_of_a_store_that_gives_no_answer_nobody_is_heard() -> None:
    class Stuck(HashStore):
        def check(self, keys: list[str]) -> bool:
            time.sleep(60)
            return False

    here = Pulse(Stuck(), 0, 2, timeout_s=0.5)
    began = time.monotonic()
    assert here.missing() == [1]
    here.end()
    assert time.monotonic() - began < 5
