"""Who beats is alive, and who does not is told apart from those who do."""

from __future__ import annotations

import time

from torch.distributed import HashStore

from qarl.cluster.pulse import Pulse


def test_a_rank_that_beats_no_more_is_missing() -> None:
    store = HashStore()
    here, there = Pulse(store, 0, timeout_s=0.25), Pulse(store, 1, timeout_s=0.25)
    try:
        assert here.beat_s == 0.05
        assert here.missing([1]) == []
        there.end()
        assert here.missing([1, 2]) == [1, 2]  # the last has never been there
        assert here.silent_for(1) == 0.0  # since it was first asked for
        time.sleep(0.1)
        assert here.silent_for(1) >= 0.1
        assert there.missing([0]) == []
    finally:
        here.end()
