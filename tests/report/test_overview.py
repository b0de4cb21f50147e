"""The head of a page: state, figures and what differs."""

from collections.abc import Callable
from pathlib import Path

from qarl.report.history import read_runs
from qarl.report.overview import differences, overview, recipes, state_of
from tests.report.conftest import LOG


def test_a_finished_run_in_figures(run: Path):
    (section,) = overview(read_runs([run]))
    for cell in (
        "<td>finished</td>",
        "<td>3 of 3</td>",
        "<td>0 → 1</td>",
        "<td>0.100 (0.050 to 0.200) → 0.900 (0.800 to 0.950)</td>",
        "<td>exact</td>",
        "<td>3.583 s</td>",  # (3.5 + 4 + 3.25) / 3
        "<td>10.8 s</td>",
        "<td>tiny</td>",
    ):
        assert cell in section.html
    assert "first: 1 warning in run.log" in section.html
    assert "<li>step 2: answers repeat themselves\n  | and this line belongs to it</li>" in section.html


def test_what_ended_a_run_is_told(make_run: Callable[..., Path]):
    log = LOG + "2026-11-30 10:00:03,000 ERROR stopped after step 3: answers are empty\n"
    assert state_of(read_runs([make_run("a", log=log)])[0]) == "stopped: stopped after step 3: answers are empty"
    assert state_of(read_runs([make_run("b", "--steps=5")])[0]) == "stopped: run.log gives no reason, as after a kill"


def test_a_run_measured_once_has_no_second_figure(run: Path):
    lines = (run / "evaluations.jsonl").read_text().splitlines(keepends=True)
    (run / "evaluations.jsonl").write_text(lines[0])
    assert "0.100 (0.050 to 0.200) → not measured yet" in overview(read_runs([run]))[0].html


def test_only_keys_that_differ_are_listed(make_run: Callable[..., Path]):
    folders = [make_run("a"), make_run("b", "--learner.lr=0.5", "--scheme=none")]
    section = overview(read_runs(folders))[1]
    assert section.title == "What differs in their recipes"
    assert "<td>learner.lr</td><td>0.001</td><td>0.5</td>" in section.html
    assert "<td>scheme</td><td>w8a8-int8</td><td>none</td>" in section.html
    assert section.html.count("<tr>") == 3


def test_equal_recipes_are_said_to_be_equal(make_run: Callable[..., Path]):
    assert "equal values in all keys" in overview(read_runs([make_run("a"), make_run("b")]))[1].html


def test_tables_of_a_list_and_absent_keys_are_compared():
    one = {"rewards": [{"type": "answer"}], "seed": 0, "name": None}
    other = {"rewards": [{"type": "answer"}, {"type": "length"}], "seed": 0}
    assert differences({"a": one, "b": other}) == [{"key": "rewards.1.type", "a": None, "b": "length"}]


def test_recipes_are_whole(run: Path):
    assert "<summary>first</summary>" in recipes(read_runs([run])).html
    assert "max_new_tokens = " in recipes(read_runs([run])).html
