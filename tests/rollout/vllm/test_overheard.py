"""What is said on standard error while a block runs: it arrives there, and the first error of a failure is found."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from qarl.rollout.vllm.overheard import ERROR, Overheard

CHAIN = """
import sys
print("before")
print("aside", file=sys.stderr, flush=True)
try:
    raise ValueError("no room for 3 blocks")
except ValueError as error:
    raise RuntimeError("the engine did not start") from error
"""


def test_the_first_error_of_another_process_is_found_and_all_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    overheard = Overheard()
    with pytest.raises(subprocess.CalledProcessError), overheard:
        subprocess.run([sys.executable, "-c", CHAIN], check=True)
    assert overheard.first_error() == "ValueError: no room for 3 blocks"
    subprocess.run([sys.executable, "-c", "import sys; print('later', file=sys.stderr)"], check=True)
    said = capfd.readouterr().err
    assert said.startswith("aside\n") and "RuntimeError: the engine did not start" in said and said.endswith("later\n")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("(EngineCore pid=7) ERROR 12-01 16:20:00 [core.py:12] ValueError: of [3] blocks", "ValueError: of [3] blocks"),
        ("torch.cuda.OutOfMemoryError: 2 GiB", "torch.cuda.OutOfMemoryError: 2 GiB"),
        ("  raise ValueError: not the end", None),
        ("a KeyError: in the middle", None),
        ("Error of nobody", None),
    ],
)
def test_the_last_line_of_a_traceback_is_an_error(line: str, error: str | None) -> None:
    found = ERROR.search(f"some words\n{line}\nmore")
    assert (None if found is None else found[1]) == error


def test_what_goes_well_is_passed_on_and_not_kept(capfd: pytest.CaptureFixture[str]) -> None:
    overheard = Overheard()
    with overheard:
        living = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read(); print('ValueError: late', file=sys.stderr)"],
            stdin=subprocess.PIPE,
        )
    living.communicate(b"")
    overheard._listener.join(10)
    assert overheard.first_error() is None
    assert capfd.readouterr().err == "ValueError: late\n"


def test_without_an_error_there_is_none() -> None:
    overheard = Overheard()
    with pytest.raises(ZeroDivisionError), overheard:
        subprocess.run([sys.executable, "-c", "import os; os._exit(1)"])
        _ = 1 / 0
    assert overheard.first_error() is None
    assert threading.active_count() == 1 or not overheard._listener.is_alive()
