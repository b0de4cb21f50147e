"""The command line without the `qarl` script."""

import subprocess
import sys
from pathlib import Path

from qarl import __version__

ROOT = Path(__file__).resolve().parents[1]


def test_the_package_can_be_run() -> None:
    answer = subprocess.run([sys.executable, "-m", "qarl", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert (answer.returncode, answer.stdout.strip(), answer.stderr) == (0, __version__, "")


def test_a_reader_that_leaves_early_is_no_reason_to_complain() -> None:
    command = [sys.executable, "-m", "qarl", "doctor"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1


def test_its_exit_code_is_the_command_line_s() -> None:
    answer = subprocess.run([sys.executable, "-m", "qarl", "trian"], cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 2
    assert "Did you mean" in answer.stderr


def test_a_process_that_imports_it_does_not_run_it() -> None:
    command = [sys.executable, "-c", "import qarl.__main__", "--version"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")
