"""The lock of a run folder, and where things lie in it."""

import errno
import os
import signal
from pathlib import Path

import pytest

from qarl.errors import ConfigurationError
from qarl.runfolder import RunFolder, RunLock, run_at


def test_the_paths_are_those_of_the_contract() -> None:
    run = RunFolder(Path("runs/a"))
    paths = [run.recipe, run.completions, run.checkpoints, run.events, run.log]
    assert [path.name for path in paths] == [
        "recipe.toml", "completions", "checkpoints", "events", "run.log",
    ]  # fmt: skip
    assert {path.parent for path in paths} == {run.path}


def test_a_second_run_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "new" / "run")
    refusal = rf"new/run is in use by process {os.getpid()} on .*--run-dir"
    with run.lock(), pytest.raises(ConfigurationError, match=refusal):
        run.lock().__enter__()
    with run.lock():
        assert (run.path / "run.lock").read_text().startswith(f"process {os.getpid()} on ")


def test_the_lock_dies_with_its_process_even_when_a_forked_worker_lives_on(tmp_path: Path) -> None:
    ready_out, ready_in = os.pipe()
    child = os.fork()
    if child == 0:
        RunLock(tmp_path).__enter__()
        if os.fork() == 0:
            signal.alarm(20)
            # Said by the worker itself: what it closes after the fork is closed by now.
            os.write(ready_in, str(os.getpid()).encode())
        signal.pause()
    worker = int(os.read(ready_out, 20))
    try:
        with pytest.raises(ConfigurationError, match=f"in use by process {child} on"):
            RunLock(tmp_path).__enter__()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.kill(worker, 0)
        with RunLock(tmp_path):
            assert f"process {os.getpid()}" in (tmp_path / "run.lock").read_text()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_an_error_inside_frees_the_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyError), RunLock(tmp_path):
        raise KeyError
    with RunLock(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"file/run cannot be written: Not a directory"):
        RunLock(tmp_path / "file" / "run").__enter__()


def test_a_full_disk_is_said_and_the_lock_is_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refused)
        with pytest.raises(ConfigurationError, match=r"cannot be written: No space left on device; make room"):
            RunLock(tmp_path).__enter__()
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("name", ["x" * 5000, "a/" * 3000, "a\0b"])
def test_what_cannot_be_a_path_is_no_run(name: str) -> None:
    assert run_at(Path(name)) is None


def test_a_run_is_seen_to_be_running_without_a_trace(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert not run.is_running()
    assert not run.path.exists()
    with run.lock():
        held = (run.path / "run.lock").read_text()
        assert run.is_running()
        assert (run.path / "run.lock").read_text() == held
    assert not run.is_running()
