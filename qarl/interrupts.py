"""SIGINT, SIGTERM and SIGHUP, delivered only where nothing is half done."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self


class Interrupted(KeyboardInterrupt):
    """The user or the system asked the run to stop, and it stands between two steps: its state can be saved."""


class Interrupts:
    """While entered, a signal waits for the next `allowed()` block; a second one ends the process where it is.

    `announce` is told what a signal that has to wait is waiting for.
    """

    def __init__(self, announce: Callable[[str], None] = lambda message: None) -> None:
        self._announce = announce
        self._pending = False
        self._allowed = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside, a signal raises `Interrupted` at once, a waiting one at the entrance."""
        self._allowed = True
        try:
            if self._pending:
                raise self._interrupted()
            yield
        finally:
            self._allowed = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._allowed:
            # Not allowed from here on: unwinding and saving must not be cut short by an impatient second signal.
            self._allowed = False
            raise self._interrupted()
        if self._pending:
            raise KeyboardInterrupt("interrupted twice")
        self._pending = True
        self._announce("stopping after this update; interrupt again to quit without saving")

    def _interrupted(self) -> Interrupted:
        self._pending = False
        return Interrupted("interrupted")
