"""Processes that stand for runs: their order, their number, and how a signal ends them."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from qarl.compare.experiment import Comparison, choose
from qarl.compare.jobs import Job, jobs_in
from qarl.compare.pool import Pool, Watcher, train_command
from qarl.interrupts import Interrupted
from qarl.recipe import load_recipe
from tests.compare.conftest import STAND_IN, stand_in


class Notes(Watcher):
    def __init__(self) -> None:
        self.told: list[str] = []
        self.most = 0
        self.codes: dict[str, int] = {}

    def begun(self, job: Job, running: int) -> None:
        self.told.append(f"{job.name} begins")
        self.most = max(self.most, running)

    def ended(self, job: Job, code: int, running: int) -> None:
        self.codes[job.name] = code

    def stopping(self, running: int) -> None:
        self.told.append(f"stopping {running}")


@pytest.fixture
def jobs(tmp_path: Path, comparison: Comparison) -> list[Job]:
    return jobs_in(tmp_path / "out", choose(comparison, [], []))


def wait_for(*paths: Path) -> None:
    for _ in range(3000):
        if all(path.exists() for path in paths):
            return
        time.sleep(0.02)
    raise AssertionError(f"{paths} did not come")


def kill_when(*paths: Path, numbers: int = 1) -> threading.Thread:
    """A thread that interrupts this process when the files are there."""

    def wait() -> None:
        wait_for(*paths)
        for _ in range(numbers):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def is_alive(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG) == (0, 0)
    except ChildProcessError:  # it has ended, and `subprocess` has seen it
        return False


def test_runs_begin_in_order_and_only_so_many_at_a_time(jobs: list[Job]):
    notes = Notes()
    Pool(stand_in({"plain/seed-0": "stops", "tbpo/seed-1": "fails"}), 2, 1, notes).run(jobs)
    assert notes.told == [f"{job.name} begins" for job in jobs]
    assert notes.most == 2
    assert notes.codes == {"plain/seed-0": 1, "tbpo/seed-0": 0, "plain/seed-1": 0, "tbpo/seed-1": 2}
    assert "answers are empty" in jobs[0].console.read_text()


def test_a_run_has_so_many_threads(jobs: list[Job]):
    def command(job: Job) -> list[str]:
        return [sys.executable, "-S", "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]

    Pool(command, 1, 3, Notes()).run(jobs[:1])
    assert jobs[0].console.read_text() == "3\n"


def test_a_signal_lets_what_runs_save_and_begins_nothing_more(jobs: list[Job]):
    notes = Notes()
    thread = kill_when(*(job.folder.path / "begun" for job in jobs[:2]))
    with pytest.raises(Interrupted):
        Pool(stand_in({"plain/seed-0": "waits", "tbpo/seed-0": "waits"}), 2, 1, notes).run(jobs)
    thread.join()
    assert notes.told[2:] == ["stopping 2"]
    assert notes.codes == {"plain/seed-0": 130, "tbpo/seed-0": 130}
    assert [(job.folder.path / "saved").read_text() for job in jobs[:2]] == [str(int(signal.SIGINT))] * 2
    assert not jobs[2].folder.path.exists()


def test_an_impatient_user_kills_what_does_not_end(jobs: list[Job]):
    thread = kill_when(jobs[0].folder.path / "deaf", numbers=3)
    with pytest.raises(KeyboardInterrupt):
        Pool(stand_in({"plain/seed-0": "deaf"}), 1, 1, Notes()).run(jobs[:1])
    thread.join()
    killed = int((jobs[0].folder.path / "deaf").read_text())
    for _ in range(250):
        if not is_alive(killed):
            return
        time.sleep(0.02)
    raise AssertionError(f"process {killed} lives on")


@pytest.mark.skipif(sys.platform != "linux", reason="a process is bound to its parent on Linux alone")
def test_runs_save_and_end_when_the_comparison_is_killed(tmp_path: Path, experiment: Path):
    script = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from qarl.compare.experiment import choose, load_comparison
        from qarl.compare.jobs import jobs_in
        from qarl.compare.pool import Pool, Watcher
        jobs = jobs_in(Path({str(tmp_path)!r}), choose(load_comparison(Path({str(experiment)!r})), [], []))
        command = lambda job: [sys.executable, "-S", "-c", {STAND_IN!r}, str(job.folder.path), "waits"]
        Pool(command, 1, 1, Watcher()).run(jobs)
    """)
    folder = tmp_path / "plain" / "seed-0"
    process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).resolve().parents[2])
    wait_for(folder / "begun")
    process.kill()
    process.wait()
    wait_for(folder / "saved")
    assert (folder / "saved").read_text() == str(int(signal.SIGTERM))


def test_a_run_is_trained_by_its_recipe_and_goes_on_where_it_stands(jobs: list[Job]):
    jobs[0].begin()
    command = train_command(jobs[0])
    assert command[1:] == [
        *("-m", "qarl", "train", str(jobs[0].asked)),
        *("--run-dir", str(jobs[0].folder.path), "--resume", "auto"),
    ]
    assert load_recipe(jobs[0].asked).seed == 0
