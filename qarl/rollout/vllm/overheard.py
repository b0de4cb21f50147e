"""What vLLM's processes say on standard error while they start: so the first cause of a failure can be told last."""

from __future__ import annotations

import os
import re
from threading import Thread
from types import TracebackType
from typing import Self

STDERR = 2

SECONDS_TO_FALL_SILENT = 2.0
"""How long what dead processes said may be on its way."""

ERROR = re.compile(r"^(?:\(.*\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE)
"""The last line of a traceback, as Python or as vLLM's log writes it."""


class Overheard:
    """Inside the block, keeps what this process and those started there write to standard error; it arrives there too.

    Processes that outlive the block go on to be passed on, and no longer kept.
    """

    def __init__(self) -> None:
        self._said: list[bytes] = []
        self._keeps = True

    def __enter__(self) -> Self:
        self._place = os.dup(STDERR)
        read, write = os.pipe()
        os.dup2(write, STDERR)
        os.close(write)
        self._listener = Thread(target=self._listen, args=(read,), daemon=True)
        self._listener.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.dup2(self._place, STDERR)
        if error is None:
            self._keeps = False
            self._said.clear()
        else:
            self._listener.join(SECONDS_TO_FALL_SILENT)

    def first_error(self) -> str | None:
        """The first error in what was said before the block failed: Python shows a cause before what came of it."""
        found = ERROR.search(b"".join(self._said).decode(errors="replace"))
        return None if found is None else found[1].strip()

    def _listen(self, read: int) -> None:
        while said := os.read(read, 1 << 16):
            if self._keeps:
                self._said.append(said)
            os.write(self._place, said)
        os.close(read)
        os.close(self._place)
