"""What a run says on a terminal and in a file."""

import io
import logging

from qarl.tracking.console import Console, LogLines, evaluation_line, step_line

METRICS = {
    "reward/mean": 0.421875,
    "completion/length_mean": 12.34,
    "mismatch/max_abs": 0.0,
    "objective/ratio_max": 1.00021,
    "perf/rollout_tokens_per_s": 812.4,
    "time/step": 3.456,
}


def test_a_step_s_line_shows_the_figures_in_a_fixed_order() -> None:
    assert step_line(2, 15, METRICS, remaining_s=62.0) == (
        "step 3/15  reward 0.422  length 12.3  mismatch 0.0e+00  ratio_max 1.0002  tok/s 812  s 3.46  ETA 1:02"
    )


def test_a_long_wait_is_shown_in_hours() -> None:
    assert step_line(0, 2, {}, remaining_s=3600 + 61).endswith("ETA 1:01:01")


def test_a_figure_that_is_not_measured_is_left_out() -> None:
    assert "mismatch" not in step_line(0, 1, {"reward/mean": 1.0}, remaining_s=0.0)


def test_an_evaluation_s_line_shows_every_figure() -> None:
    figures = {"eval/held_out/length_mean": 12.25, "eval/held_out/pass@1": 0.925, "eval/held_out/questions": 200.0}
    assert evaluation_line(15, figures) == "held-out after 15 steps  length_mean 12.25  pass@1 0.925  questions 200"


def test_a_figure_is_shown_with_its_interval() -> None:
    figures = {"eval/sums/pass@1": 0.5, "eval/sums/pass@1_high": 0.61234, "eval/sums/pass@1_low": 0.4}
    assert evaluation_line(2, figures) == "held-out after 2 steps  pass@1 0.5 (0.400 to 0.612)"


def test_log_records_become_lines_of_the_console() -> None:
    stream = io.StringIO()
    record = logging.LogRecord("qarl", logging.INFO, "", 0, "saved %s", ("[step-2]",), None)
    LogLines(Console(stream, first_step=0, steps=2)).emit(record)
    assert stream.getvalue() == "saved [step-2]\n"


def test_without_a_terminal_there_is_one_plain_line_a_step() -> None:
    stream = io.StringIO()
    console = Console(stream, first_step=0, steps=2)
    console.open()
    console.rolling_out(3, 8)
    for step in range(2):
        console.step(step, METRICS)
    console.close()
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/2", "step 2/2"]
    assert "\x1b" not in stream.getvalue()
    assert lines[1].endswith("ETA 0:00")
