"""Figures show the metrics of the runs' files, all of them and nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from qarl.report.curves import curves
from qarl.report.history import read_runs
from qarl.report.page import Section
from qarl.tracking.jsonl import json_line
from tests.report.conftest import STEPS, figures_of


def sections_of(*folders: Path) -> dict[str, Section]:
    return {section.title: section for section in curves(read_runs(list(folders)))}


def figure(section: Section, metric: str) -> Any:
    (found,) = [spec for title, spec in figures_of(section.html).items() if title.split(":")[0] == metric]
    return found


def rewrite(run: Path, rows: list[dict[str, Any]]) -> None:
    (run / "metrics.jsonl").write_text("".join(map(json_line, rows)))


def test_a_figures_data_are_the_metrics_of_the_file(run: Path):
    sections = sections_of(run)
    (line,) = figure(sections["Reward"], "reward/mean")["data"]
    assert (line["x"], line["y"]) == ([0, 1, 2], [0.0, 0.5, 1.0])
    (line,) = figure(sections["Reward"], "reward/answer")["data"]
    assert line["y"] == [0.0, 0.25, 0.75]


def test_only_rooms_with_metrics_have_a_section(run: Path):
    assert list(sections_of(run)) == [
        "Reward",
        "Held-out questions",
        "Completion statistics",
        "Engine and learner",
        "Optimizer and weights",
        "Time and speed",
    ]
    rewrite(run, [{**row, "mine/own": row["step"]} for row in STEPS])
    assert figure(sections_of(run)["Other readings"], "mine/own")["data"][0]["y"] == [0.0, 1.0, 2.0]


def test_several_runs_share_a_figure_and_keep_their_colours(make_run: Callable[..., Path]):
    first, second = make_run("a"), make_run("b")
    rewrite(first, [{key: value for key, value in row.items() if key != "reward/answer"} for row in STEPS])
    section = sections_of(first, second)["Reward"]
    both = figure(section, "reward/mean")["data"]
    (alone,) = figure(section, "reward/answer")["data"]
    assert [trace["name"] for trace in both] == ["a", "b"]
    assert alone["name"] == "b"
    assert alone["line"]["color"] == both[1]["line"]["color"]


def test_held_out_shares_have_their_intervals(run: Path):
    low, high, line = figure(sections_of(run)["Held-out questions"], "eval/held_out/pass@1")["data"]
    assert (line["x"], line["y"]) == ([0, 3], [0.1, 0.9])
    assert (low["y"], high["y"]) == ([0.05, 0.8], [0.2, 0.95])


def test_what_never_changes_is_said_in_words(run: Path):
    section = sections_of(run)["Engine and learner"]
    assert figures_of(section.html) == {}
    assert section.note == "first: engine and learner were bit-equal in all 3 steps."
    assert "<code>mismatch/max_abs</code> 0" in section.html


def test_a_run_that_is_not_exact_is_said_to_be_so(run: Path):
    rows = zip(STEPS, [0.0, 0.1, 0.2], strict=True)
    rewrite(run, [{**row, "mismatch/bit_equal": 0.5, "mismatch/max_abs": largest} for row, largest in rows])
    section = sections_of(run)["Engine and learner"]
    assert section.note.startswith("first: not exact: bit-equal 0.5000 of tokens at worst, largest difference 0.2.")
    assert section.note.endswith("Zeros are gaps on a logarithmic axis: first mismatch/max_abs (1 of 3 steps).")
    assert figure(section, "mismatch/max_abs")["data"][0]["y"] == [None, 0.1, 0.2]


def test_readings_that_are_not_finite_are_counted(run: Path):
    rewrite(run, [{**row, "reward/mean": None if row["step"] == 1 else row["reward/mean"]} for row in STEPS])
    section = sections_of(run)["Reward"]
    assert section.note == "reward/mean was not finite in 1 step."
    assert figure(section, "reward/mean")["data"][0]["x"] == [0, 2]


def test_the_parts_of_a_steps_time_add_up_to_it(run: Path):
    areas = {trace["name"]: trace["y"] for trace in figure(sections_of(run)["Time and speed"], "time/*")["data"]}
    assert areas == {"learner": [1.0] * 3, "rollout": [2.0] * 3, "other": [0.5, 1.0, 0.25]}


def test_many_steps_are_dots_with_a_running_mean(run: Path):
    rewrite(run, [{"step": step, "reward/mean": float(step % 2), "optim/lr": step / 100} for step in range(40)])
    sections = sections_of(run)
    dots, line = figure(sections["Reward"], "reward/mean")["data"]
    assert dots["y"] == [0.0, 1.0] * 20
    assert line["y"][:5] == [0.0, 0.5, 0.333333, 0.5, 0.4]
    assert "line: mean of 5 steps" in sections["Reward"].html
    (rate,) = figure(sections["Optimizer and weights"], "optim/lr")["data"]
    assert rate["y"][-1] == 0.39
