"""Signs of life: every rank counts in the store that all share, and sees whose count stands still."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from torch.distributed.distributed_c10d import Store

LONGEST_BEAT_S = 0.5


class Pulse:
    """Beats from a thread of its own, so that a rank that computes for long is not taken for one that is gone.

    A process that is stopped or killed does not beat; one whose main thread hangs does.
    """

    def __init__(self, store: Store, rank: int, timeout_s: float) -> None:
        self.beat_s = min(LONGEST_BEAT_S, timeout_s / 5)
        self._store = store
        self._rank = rank
        self._last: dict[int, tuple[bytes, float]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="pulse")
        self._thread.start()

    def silent_for(self, rank: int) -> float:
        """Seconds since this rank was first seen with the count it has now."""
        now, count = time.monotonic(), self._count(rank)
        if rank not in self._last or self._last[rank][0] != count:
            self._last[rank] = count, now
        return now - self._last[rank][1]

    def missing(self, ranks: Iterable[int]) -> list[int]:
        """Those of the ranks that do not beat now; takes as long as three beats."""
        ranks = list(ranks)
        counts = {rank: self._count(rank) for rank in ranks}
        time.sleep(3 * self.beat_s)
        return [rank for rank in ranks if self._count(rank) == counts[rank]]

    def end(self) -> None:
        """Beat no more."""
        self._ended.set()
        self._thread.join()

    def _count(self, rank: int) -> bytes:
        return self._store.get(_key(rank)) if self._store.check([_key(rank)]) else b""

    def _beat(self) -> None:
        count = 0
        try:
            while not self._ended.is_set():
                count += 1
                self._store.set(_key(self._rank), str(count))
                self._ended.wait(self.beat_s)
        except RuntimeError:
            """The store is gone, and with it the run: whoever waits for anything finds out."""


def _key(rank: int) -> str:
    return f"pulse/{rank}"
