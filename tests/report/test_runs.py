"""`qarl report` on real and on written runs: one page, one JSON line, one clear message."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from qarl.cli import run_command
from tests.report.conftest import SMOKE, completions_of, figures_of

ALL = 2 * 2 * 3
"""Completions of a written run: groups, completions of each, steps."""


def test_a_page_about_several_runs(
    make_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, out = [make_run("a"), make_run("b", "--seed=7")], tmp_path / "page.html"
    assert run_command(["report", *map(str, runs), "--out", str(out), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    page = out.read_text(encoding="utf-8")
    assert answer == {"path": str(out), "runs": [str(run) for run in runs], "bytes": len(page.encode())}
    assert len(figures_of(page)["reward/mean: mean over the step's completions"]["data"]) == 2
    assert [run["name"] for run in completions_of(page)["runs"]] == ["a", "b"]
    assert "<title>qarl: 2 runs</title>" in page


def test_a_run_that_was_trained_is_reported_with_its_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = str(tmp_path / "run"), tmp_path / "page.html"
    small = ["--steps=2", "--prompts_per_step=2", "--group_size=2", "--sampling.max_new_tokens=8", "--eval.count=2"]
    assert run_command(["train", str(SMOKE), *small, "--run-dir", run]) == 0
    assert run_command(["report", run, "--out", str(out), "--align", "1"]) == 0
    page = out.read_text(encoding="utf-8")
    assert "run: engine and learner were bit-equal in all 2 steps." in page
    assert "<td>finished</td>" in page
    assert "relative_error" in page
    found = completions_of(page)["runs"][0]
    kept = [json.loads(line) for line in Path(run, "completions", "step-1.jsonl").read_text().splitlines()]
    assert [one["ids"] for one in found["steps"][1]["completions"]] == [row["token_ids"] for row in kept]


def test_completions_can_be_left_out(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert run_command(["report", str(run), "--out", str(out), "--completions", "0"]) == 0
    assert 'id="completions"' not in out.read_text(encoding="utf-8")


def test_damage_is_told_on_the_terminal_and_on_the_page(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{\n")
    out = tmp_path / "page.html"
    assert run_command(["report", str(run), "--out", str(out)]) == 0
    sentence = "metrics.jsonl: damaged lines are passed over: 4"
    assert capsys.readouterr().err.count(sentence) == 1
    assert sentence in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["absent", "--out", "{out}"], "absent: is no run folder"),
        (["{run}", "--out", "{run}"], "cannot be written, it is a folder"),
        (["{run}", "--out", "{run}/no/page.html"], "there is no folder"),
        (["{run}"], "--out"),
        (["{run}", "{run}", "--out", "{out}"], "is named twice"),
        (["{run}", "--out", "{out}", "--align", "10"], "the run cannot be used, it has no checkpoint yet"),
        (["{run}", "--out", "{out}", "--completions", "-1"], "Must be >= 0"),
        (["--out", "{out}"], "requires an argument"),
    ],
)
def test_misuse_is_one_line_and_leaves_no_page(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    out = tmp_path / "page.html"
    assert run_command(["report", *(one.format(run=run, out=out) for one in arguments)]) == 2
    said = capsys.readouterr().err.strip()
    assert reason in said and len(said.splitlines()) == 1
    assert not out.exists()
