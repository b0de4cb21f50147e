"""Small training runs in processes of their own that share one start-up, and what a run has to show at its end."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SMOKE = str(ROOT / "recipes" / "smoke.toml")

STEPS = 8
SMALL = (
    f"--steps={STEPS}",
    "--prompts_per_step=2",
    "--group_size=4",
    "--sampling.max_new_tokens=8",
    "--eval.count=4",
    "--eval.every=2",
)

OF_THE_CLOCK = ("time/", "perf/", "memory/", "cpu/")
"""Metrics that no two runs have in common."""

INTERRUPTED = 130
CRASHED = 99
"""Exit code of a child that let an exception escape, which the command line never does."""


def train_command(folder: Path, *overrides: str) -> list[str]:
    """Train, or go on training, in this folder."""
    return ["train", SMOKE, "--run-dir", str(folder), "--resume", "auto", *SMALL, *overrides]


def warm_up() -> None:
    """Import and compile what every run needs, so that a child only has to train."""
    import torch

    from qarl.build import build
    from qarl.recipe import load_recipe

    torch.set_num_threads(1)  # children inherit no other threads
    build(load_recipe(Path(SMOKE)))


def start(command: Sequence[str], said: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Run a `qarl` command in a forked child, which writes both streams to `said`; returns its process id."""
    child = os.fork()
    if child:
        return child
    code = CRASHED
    try:
        stream = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        from qarl.cli import run_command

        prepare()
        # A shell has its background jobs ignore it, and they have their children.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run_command(command)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def wait(child: int) -> int:
    """The child's exit code; minus the number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(command: Sequence[str], said: Path) -> int:
    """Run a command to its end."""
    return wait(start(command, said))


def newest_step(folder: Path) -> int:
    """The step of the newest whole checkpoint of a run; 0 without one."""
    from qarl.checkpoint import newest_checkpoint

    found = newest_checkpoint(folder / "checkpoints")
    return found.step if found is not None else 0


def outcome(folder: Path) -> dict[str, Any]:
    """Everything but what a clock makes: figures, completions, and the bytes of the last weights and optimizer."""
    from qarl.checkpoint import newest_checkpoint

    last = newest_checkpoint(folder / "checkpoints")
    assert last is not None, f"{folder}: a run that ended has a checkpoint"
    return {
        "metrics": _timeless(folder / "metrics.jsonl"),
        "evaluations": _timeless(folder / "evaluations.jsonl"),
        "completions": {path.name: path.read_bytes() for path in sorted((folder / "completions").iterdir())},
        "state": {
            str(path.relative_to(last.folder)): path.read_bytes()
            for path in sorted(last.folder.rglob("*"))
            if path.is_file() and path.name != "metadata.json"
        },
        "unfinished": sorted(path.name for path in (folder / "checkpoints").glob(".*")),
    }


def _timeless(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(OF_THE_CLOCK)} for row in rows]
