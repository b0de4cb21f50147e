"""Signs of life: every rank counts in the store that all share, and sees whose count stands still."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from torch.distributed.distributed_c10d import Store

LONGEST_BEAT_S = 0.5
WORD = "word"


class Pulse:
    """Beats, and looks at the others', from a thread of its own: so a rank that computes for long is not taken for one
    that is gone, and nobody waits for a store that is gone itself.

    A process that is stopped or killed does not beat; one whose main thread hangs does.
    """

    def __init__(self, store: Store, rank: int, count: int, timeout_s: float) -> None:
        self.beat_s = min(LONGEST_BEAT_S, timeout_s / 5)
        self.word = ""
        """What a rank left in the store of why the run ends."""
        self._store = store
        self._rank = rank
        self._counts = dict.fromkeys((other for other in range(count) if other != rank), b"")
        self._changed = dict.fromkeys(self._counts, time.monotonic())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="pulse")
        self._thread.start()

    def silent_for(self, ranks: Iterable[int]) -> float:
        """Seconds that the most silent of these has not been seen to beat."""
        return time.monotonic() - min(self._changed[rank] for rank in ranks)

    def missing(self) -> list[int]:
        """The ranks that do not beat now; takes as long as four beats."""
        time.sleep(4 * self.beat_s)
        return [rank for rank in self._changed if self.silent_for([rank]) > 3 * self.beat_s]

    def leave_word(self, word: str) -> None:
        """For the others to see at their next beat."""
        self._store.set(WORD, word)

    def end(self) -> None:
        """Beat no more."""
        self._ended.set()
        self._thread.join(2 * self.beat_s)

    def _beat(self) -> None:
        beats = 0
        try:
            while not self._ended.is_set():
                beats += 1
                self._store.set(_key(self._rank), str(beats))
                self._look()
                self._ended.wait(self.beat_s)
        except RuntimeError:
            """The store is gone: then all others are silent."""

    def _look(self) -> None:
        for rank, count in self._counts.items():
            found = self._store.get(_key(rank)) if self._store.check([_key(rank)]) else b""
            if found != count:
                self._counts[rank], self._changed[rank] = found, time.monotonic()
        if self._store.check([WORD]):
            self.word = self._store.get(WORD).decode()


def _key(rank: int) -> str:
    return f"pulse/{rank}"
