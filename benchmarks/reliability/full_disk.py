"""Fill the disk under training runs at every kind of moment, make room again, and compare with a run that had room.

    python -m benchmarks.reliability.full_disk --points 40 --report full_disk.json

Runs of the tiny model lie on a small file system in memory, which root may mount, and others where the system lets
them have a user namespace. The file system is full before one of the file operations of a run, or too small for its
n-th checkpoint, or read-only. Each time the run must end in its own words, or go on where nothing that matters was
lost; what it saved before must open; and with room again, it must go on to the results of the run that had room, bit
for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.reliability.runs import CRASHED, newest_step, outcome, run, start, train_command, wait, warm_up

SIZES = ("--steps=4", "--checkpoint.every=1", "--checkpoint.keep_last=10")
ROOMY = 64 << 20
FILLER = "filler"
WRITES = os.O_WRONLY | os.O_RDWR
IN_NAMESPACE = "QARL_IN_NAMESPACE"
"""Set in the environment of this program's second life, in which it may mount."""

FAILED, MISUSED = 1, 2
TENSORBOARD = "tensorboard/summary/writer"


def main() -> None:
    """Do all the runs, then print what came of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--points", type=int, default=40, help="at how many file operations of a run the disk is full")
    parser.add_argument("--report", type=Path, default=Path("full_disk.json"))
    arguments = parser.parse_args()
    _become_able_to_mount()
    warm_up()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assert run(train_command(folder / "roomy", *SIZES), folder / "roomy.said") == 0
        expected = outcome(folder / "roomy")
        rows = [
            *(_too_small_for(number, folder, expected) for number in (1, 2, 3)),
            *(_full_before(operation, folder, expected) for operation in _operations(folder, arguments.points)),
            _read_only(folder),
        ]
    arguments.report.write_text(json.dumps(rows, indent=1))
    print(table(rows))
    sys.exit(any(row["faults"] for row in rows))


def table(rows: list[dict[str, Any]]) -> str:
    """The counts of a report, as a Markdown table."""
    codes = Counter((row["kind"], row["code"]) for row in rows)
    lines = ["| the disk is | exit code | runs | faults |", "| --- | ---: | ---: | ---: |"]
    for (kind, code), count in sorted(codes.items()):
        faults = sum(len(row["faults"]) for row in rows if (row["kind"], row["code"]) == (kind, code))
        lines.append(f"| {kind} | {code} | {count} | {faults} |")
    return "\n".join(lines)


def _too_small_for(number: int, folder: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Half of the n-th checkpoint finds no room; the earlier ones survive, and the message says what and where."""
    checkpoints = folder / "roomy" / "checkpoints"
    one = _bytes_in(checkpoints) // len(list(checkpoints.glob("step-*")))
    others = _bytes_in(folder / "roomy") - _bytes_in(checkpoints)
    with _mounted(folder / "small", others + (2 * number - 1) * one // 2) as disk:
        said = folder / "small.said"
        code = run(train_command(disk / "run", *SIZES), said)
        words = said.read_text()
        faults = _common_faults(code, words)
        promised = [f"the checkpoint of step {number} could not be written", "No space left on device", str(disk)]
        promised.append("there is no earlier checkpoint" if number == 1 else f"step-{number - 1} is whole")
        faults += [f"does not say {part!r}" for part in promised if part not in words]
        if code != FAILED:
            faults.append(f"exit code {code} instead of {FAILED}")
        if newest_step(disk / "run") != number - 1:
            faults.append(f"step {newest_step(disk / 'run')} is the newest whole checkpoint")
        _resize(disk, ROOMY)
        return _finish(f"too small for checkpoint {number}", disk, code, words, faults, expected)


def _full_before(operation: int, folder: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Nothing more can be written from the n-th file operation on."""
    with _mounted(folder / "filled", ROOMY) as disk:
        said = folder / "filled.said"
        child = start(train_command(disk / "run", *SIZES), said, lambda: _fill_before(operation, disk))
        code = wait(child)
        words = said.read_text()
        faults = _common_faults(code, words)
        (disk / FILLER).unlink(missing_ok=True)
        return _finish("full before a file operation", disk, code, words, faults, expected) | {"operation": operation}


def _read_only(folder: Path) -> dict[str, Any]:
    """A run folder that can be read and not written: refused before anything is trained."""
    with _mounted(folder / "locked", ROOMY) as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        code = run(train_command(disk / "run", *SIZES), folder / "locked.said")
        words = (folder / "locked.said").read_text()
        faults = _common_faults(code, words)
        if code != MISUSED or "cannot be written: Read-only file system" not in words:
            faults.append(f"exit code {code}: {words[-500:]}")
        return {"kind": "read-only", "code": code, "faults": faults, "said": words.splitlines()[-1:]}


def _finish(
    kind: str, disk: Path, code: int, words: str, faults: list[str], expected: Mapping[str, Any]
) -> dict[str, Any]:
    """With room again, go on to the end and compare."""
    for path in (disk / "run" / "checkpoints").glob("step-*"):
        from qarl.checkpoint import open_checkpoint

        open_checkpoint(path)
    again = disk / "again.said"
    if (last := run(train_command(disk / "run", *SIZES), again)) != 0:
        faults.append(f"with room, exit code {last}: {again.read_text()[-2000:]}")
    else:
        found = outcome(disk / "run")
        faults += [f"other {name} than with room" for name in expected if found[name] != expected[name]]
    return {"kind": kind, "code": code, "faults": faults, "said": words.splitlines()[-1:]}


def _common_faults(code: int, words: str) -> list[str]:
    faults = []
    if code not in (0, FAILED, MISUSED) or code == CRASHED:
        faults.append(f"exit code {code}")
    # TensorBoard's writer has a thread of its own, which speaks for itself; see docs/reliability.md.
    traces = [trace for trace in words.split("Traceback (most recent call last)")[1:] if TENSORBOARD not in trace]
    return [*faults, *(f"a traceback: {trace[:3000]}" for trace in traces)]


def _operations(folder: Path, count: int) -> list[int]:
    """So many of the file operations of a run, evenly spaced."""
    seen = folder / "operations"
    child = start(
        train_command(folder / "counted", *SIZES), folder / "counted.said", lambda: _count(seen, folder / "counted")
    )
    assert wait(child) == 0
    total = len(seen.read_bytes())
    return [1 + index * total // count for index in range(count)]


def _count(seen: Path, folder: Path) -> None:
    """One byte in `seen` for every file operation below `folder`."""
    file = os.open(seen, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def watch(event: str, details: tuple[Any, ...]) -> None:
        if _writes(event, details, folder):
            os.write(file, b".")

    sys.addaudithook(watch)


def _fill_before(operation: int, disk: Path) -> None:
    """Fill the disk before the n-th file operation on it."""
    seen = 0

    def watch(event: str, details: tuple[Any, ...]) -> None:
        nonlocal seen
        if _writes(event, details, disk / "run"):
            seen += 1
            if seen == operation:
                seen += 1  # filling opens a file too
                _fill(disk)

    sys.addaudithook(watch)


def _writes(event: str, details: tuple[Any, ...], folder: Path) -> bool:
    if event not in ("open", "os.mkdir", "os.rename") or not str(details[0]).startswith(str(folder)):
        return False
    return event != "open" or bool(details[2] & WRITES)


def _fill(disk: Path) -> None:
    file = os.open(disk / FILLER, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(file, bytes(1 << 16))
    with contextlib.suppress(OSError):
        while True:
            os.write(file, bytes(1))
    os.close(file)


@contextlib.contextmanager
def _mounted(folder: Path, size: int) -> Iterator[Path]:
    """A file system of its own for a while."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        for said in folder.parent.glob(f"{folder.name}.said"):
            said.unlink()


def _resize(folder: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)


def _bytes_in(folder: Path) -> int:
    """As the file system counts, in whole pages."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


def _become_able_to_mount() -> None:
    """Start again in a namespace where this user may mount; leave, with the reason, where there is none."""
    with tempfile.TemporaryDirectory() as name:
        tried = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", name], capture_output=True, text=True)
        if tried.returncode == 0:
            subprocess.run(["umount", name], check=True)
            return
    reason = tried.stderr.strip()
    if (
        IN_NAMESPACE not in os.environ
        and subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0
    ):
        os.environ[IN_NAMESPACE] = "1"
        os.execvp(
            "unshare", ["unshare", "-rm", sys.executable, "-m", "benchmarks.reliability.full_disk", *sys.argv[1:]]
        )
    print(f"skipped: no file system can be mounted here ({reason})")
    sys.exit(0)


if __name__ == "__main__":
    main()
