"""The command line: exit codes, one-line refusals, and JSON as the last line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qarl.cli import run_command as run

ROOT = Path(__file__).resolve().parents[1]
SMOKE = str(ROOT / "recipes" / "smoke.toml")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = run(arguments)
    return code, capsys.readouterr().err.strip()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["trian"], 'Unknown command "trian". Did you mean "train"?'),
        (["train"], "requires an argument"),
        (["train", "absent.toml"], "absent.toml: cannot be read"),
        (["train", SMOKE, "--learner.lrr=1"], "learner.lrr = 1: unknown key; did you mean 'lr'?"),
        (["train", SMOKE, "--sampling.temperature=0"], "sampling.temperature = 0: must be greater than 0"),
        (["train", SMOKE, "--resume", "nowhere"], "--resume nowhere: is no run folder"),
        (["eval", "tiny"], "of a bare model --prompts is required"),
        (["eval", "tiny", "--prompts", "arithmetik"], "did you mean 'arithmetic'?"),
        (["bench", "rollout", "--batch", "0"], "Must be >= 1"),
        (["align", "tiny"], "--scheme requires an argument"),
    ],
)
def test_misuse_is_exit_code_2_and_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    code, error = refusal(capsys, *arguments)
    assert code == 2
    assert reason in error
    assert "\n" not in error


def test_doctor_answers_in_json_on_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    assert "kernels" in json.loads(capsys.readouterr().out.splitlines()[-1])


def test_doctor_answers_people_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"]) == 0
    assert "\n  w8a8-int8  " in capsys.readouterr().out


def test_help_answers_in_half_a_second() -> None:
    seconds = []
    for _ in range(3):
        before = os.times()
        command = [sys.executable, "-c", "from qarl.cli import main; main()", "--help"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        after = os.times()
        # The machine may be busy: the child's own time counts, and the best of a few.
        seconds.append(after.children_user - before.children_user + after.children_system - before.children_system)
    assert min(seconds) < 0.5


def test_a_dry_run_shows_the_recipe_and_trains_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run(["train", SMOKE, "--dry-run", "--json", "--steps=3", "--run-dir", str(folder)]) == 0
    said = capsys.readouterr()
    answer = json.loads(said.out.splitlines()[-1])
    assert (answer["dry_run"], answer["steps"], answer["recipe"]["steps"]) == (True, 3, 3)
    assert "steps = 3" in said.err
    assert "What is" in said.err  # the rendered first prompt
    assert not folder.exists()


def test_a_signal_ends_a_run_with_130_after_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["train", SMOKE, "--run-dir", str(folder), "--steps=100000", "--checkpoint.every=100000"]
    command = [sys.executable, "-c", "from qarl.cli import main; main()", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2/"):
            break
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"--resume {folder}" in error.splitlines()[-1]
    latest = (folder / "checkpoints" / "latest").read_text().strip()
    assert int(latest.removeprefix("step-")) >= 2


def test_train_then_eval_then_train_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    small = ["--steps=2", "--prompts_per_step=2", "--group_size=2", "--sampling.max_new_tokens=4", "--eval.count=2"]
    command = ["train", SMOKE, "--run-dir", str(folder), "--json", *small]
    assert run(command) == 0
    said = capsys.readouterr()
    summary = json.loads(said.out.splitlines()[-1])
    assert summary["steps"] == 2
    assert summary["run_dir"] == str(folder)
    assert Path(summary["picture"]).read_bytes().startswith(b"\x89PNG")
    assert "step 2/2" in said.err

    assert run(["eval", str(folder), "--count", "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["version"] == 2
    assert answer["eval/arithmetic/questions"] == 3.0

    assert run([*command, "--resume", "never"]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert run([*command, "--learner.lr=1.0"]) == 2
    assert "other values of learner.lr" in capsys.readouterr().err
