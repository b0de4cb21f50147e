"""Whether this process is one of several, and which; light, since the command line asks before anything is loaded."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from qarl.cluster.config import ClusterConfig
    from qarl.cluster.crew import Crew


def is_launched() -> bool:
    """Whether `torchrun` started this process and others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_follower() -> bool:
    """Whether it is another one than the first."""
    return is_launched() and int(os.environ["RANK"]) > 0


@contextmanager
def leading(recipe: str, config: ClusterConfig) -> Iterator[Crew | None]:
    """Lead the other processes, which are told the recipe, until the end of the block; None where there are none."""
    if not is_launched():
        yield None
        return
    from qarl.cluster.crew import lead

    crew = lead(recipe, config.timeout_s)
    try:
        yield crew
    finally:
        try:
            crew.dismiss()
        finally:
            crew.leave()


def end(code: int) -> NoReturn:
    """Exit with this code; one of several processes without taking the interpreter down, for process groups would wait
    for a lost rank then.
    """
    if is_launched():
        atexit._run_exitfuncs()  # engines in processes of their own end there
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)


def record(words: str) -> None:
    """For torchrun's own account of which process failed first, and why."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is not None:
        Path(file).write_text(json.dumps({"message": words, "timestamp": int(time.time())}), encoding="utf-8")
