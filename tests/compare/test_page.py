"""The page: its curves are means of whole arms, and what stands in it is what was measured."""

import re
from pathlib import Path
from typing import Any

from qarl.compare.experiment import Comparison
from qarl.compare.page import arm_curves, points, write_comparison
from qarl.compare.results import RunResult
from tests.compare.conftest import result, results_of

ACCURACY = "eval/held_out/pass@1"


def run(seed: int, rewards: list[float], **given: Any) -> RunResult:
    steps = list(range(1, len(rewards) + 1))
    return result("tbpo", seed, 0.5, curves={"step": steps, "reward/mean": rewards}, **given)


def test_a_curve_has_running_means_of_steps_and_evaluations_as_they_are():
    one = run(0, [0.0, 1.0, 2.0])
    assert points(one, "reward/mean", 2) == {1.0: 0.0, 2.0: 0.5, 3.0: 1.5}
    assert points(one, ACCURACY, 2) == {0.0: 0.1, 4.0: 0.5}
    assert points(one, "absent", 2) == {}


def test_the_mean_of_an_arm_ends_with_its_first_run_and_single_runs_go_on(comparison: Comparison):
    stopped = run(1, [0.4, 0.4], state="stopped", steps=2)
    unfinished = run(2, [9.0], state="unfinished", steps=1)
    results = results_of(comparison, run(0, [0.0, 0.2, 0.4]), stopped, unfinished)
    results.settings["window"] = 1
    *singles, mean = arm_curves(results, "tbpo", "reward/mean")
    assert [(one.faint, list(one.x), one.group) for one in singles] == [
        (True, [1.0, 2.0, 3.0], "tbpo"),
        (True, [1.0, 2.0], "tbpo"),
        (True, [1.0], "tbpo"),
    ]
    assert (mean.x, [round(value or 0.0, 6) for value in mean.y]) == ([1.0, 2.0], [0.2, 0.3])
    assert (mean.low, mean.high, mean.faint) == ([0.0, 0.2], [0.4, 0.4], False)


def test_the_band_of_a_single_run_is_none(comparison: Comparison):
    *_, mean = arm_curves(results_of(comparison, run(0, [0.0, 0.2])), "tbpo", "reward/mean")
    assert (mean.low, mean.high) == (None, None)


def test_the_page_tells_everything_in_one_file(tmp_path: Path, comparison: Comparison):
    why = "answers are <b>empty</b>"
    results = results_of(comparison, result("plain", 0, 0.5), run(1, [0.25], state="stopped", steps=1, reason=why))
    path = tmp_path / "page.html"
    write_comparison(path, results)
    text = path.read_text()
    body = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert re.findall("<h2>(.*?)</h2>", body) == [
        *("Results", "Until reward/mean reached a target", "Curves", "Time", "Arms", "Runs"),
    ]
    assert "stopped at step 1: answers are &lt;b&gt;empty&lt;/b&gt;" in body
    assert "<code>scheme = &#39;none&#39;</code>" in body
    assert "<td>75.0%</td>" in body  # 6 of 8 seconds of rollout
    assert body.count("<figure") == 2  # the accuracy, and the reward; of mismatch nothing was measured
    assert "src=" not in body and "<link" in body and 'href="http' not in body


def test_a_page_of_nothing_yet_is_a_page(tmp_path: Path, comparison: Comparison):
    nothing = result("plain", 0, None, state="unfinished", steps=0, evaluations=[], curves={"step": []}, parts={})
    write_comparison(tmp_path / "page.html", results_of(comparison, nothing))
    assert "not begun: plain/seed-0" in (tmp_path / "page.html").read_text()
