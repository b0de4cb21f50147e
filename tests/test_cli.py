"""The command line: exit codes, one-line refusals, and JSON as the last line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qarl.bench import roofline, timing
from qarl.cli import _table
from qarl.cli import run_command as run

ROOT = Path(__file__).resolve().parents[1]
SMOKE = str(ROOT / "recipes" / "smoke.toml")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks whose figures nobody reads."""
    monkeypatch.setattr(timing, "REPEATS", 1)
    monkeypatch.setattr(timing, "BEST_OF_SECONDS", 0.01)
    monkeypatch.setattr(roofline, "PEAK_SIZES", ((32, 128, 128),))


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
        (
            ["train", SMOKE, "--sampling.temperature=0"],
            "sampling.temperature = 0: must be greater",
        ),
        (["train", SMOKE, "--resume", "nowhere"], "--resume nowhere: is no run folder"),
        (["eval", "tiny"], "of a bare model --prompts is required"),
        (["eval", "tiny", "--prompts", "arithmetik"], "did you mean 'arithmetic'?"),
        (["bench", "rollout", "--batch", "0"], "Must be >= 1"),
        (["bench", "rollout", "--kv-cache", "fp8"], "Choose from"),
        (["bench", "kernels", "--model", "tiny", "--context", "4096"], "--context 4096 exceeds the model's context of"),
        (["align", "tiny"], "--scheme requires an argument"),
        (["serve"], "requires an argument"),
        (["serve", "absent.toml"], "absent.toml: cannot be read"),
        (["serve", SMOKE], "engine.type = 'native': only vLLM can be served; set engine.type = 'vllm'"),
        (["serve", SMOKE, "--port", "0"], "Must be >= 1"),
        (["serve", SMOKE, "--engine.type=vllm", "--engine.dtyp=x"], "unknown key; did you mean 'dtype'?"),
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


def test_a_benchmark_answers_in_json_and_tells_progress_apart(capsys: pytest.CaptureFixture[str], quick: None) -> None:
    sizes = ["--batch", "2", "--prompt-len", "4", "--new-tokens", "3"]
    options = ["--model", "tiny", "--kv-cache", "int8", "--threads", "2"]
    assert run(["bench", "rollout", *options, *sizes, "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    assert (found["new_tokens"], found["kv_cache"], found["threads"]) == (3, "int8", 2)
    assert "rollout 0:" in said.err and "(warm-up)" in said.err


@pytest.mark.parametrize(
    "arguments", [["learner", "--batch", "2"], ["step", "--batch", "2", "--group-size", "2", "--kv-cache", "int8"]]
)
def test_updates_and_steps_take_a_number_of_threads(
    capsys: pytest.CaptureFixture[str], quick: None, arguments: list[str]
) -> None:
    more = ["--model", "tiny", "--prompt-len", "4", "--new-tokens", "3", "--threads", "2", "--json"]
    assert run(["bench", *arguments, *more]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["threads"] == 2


def test_kernels_are_a_table_for_people_and_json_for_programs(capsys: pytest.CaptureFixture[str], quick: None) -> None:
    command = ["bench", "kernels", "--model", "tiny", "--scheme", "none", "--batch", "2", "--context", "40"]
    assert run([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["operations"][-1]["operation"] == "sample"
    assert run(command) == 0
    table = capsys.readouterr().out.partition("\noperations\n")[2].splitlines()
    names = [row["operation"] for row in found["operations"]]
    assert [line[2:16].strip() for line in table[-len(names) :]] == names
    assert {len(line) for line in table[-len(names) :]} == {len(table[-1])}


def test_a_table_has_text_to_the_left_and_numbers_to_the_right() -> None:
    rows = [
        {"operation": "norm", "us_per_call": 12.34567, "share": None},
        {"operation": "head GEMM", "us_per_call": 3456789.0, "share": 0.5},
    ]
    assert _table(rows) == [
        "                us",
        "               per",
        "operation     call  share",
        "norm         12.35      -",
        "head GEMM  3456789    0.5",
    ]


def test_serve_hands_on_the_recipe_and_where_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr("qarl.serve.serve", lambda *arguments: told.append(arguments))
    assert (
        run(["serve", SMOKE, "--engine.type=vllm", "--host", "0.0.0.0", "--port", "8123", "--engine.dtype=float32"])
        == 0
    )
    assert run(["serve", SMOKE, "--engine.type=vllm"]) == 0
    recipe, host, port, _ = told[0]
    assert (recipe.engine.type, recipe.engine.dtype, host, port) == ("vllm", "float32", "0.0.0.0", 8123)
    assert told[1][1:3] == ("127.0.0.1", 8000)
