"""Whole runs of the tiny model: what they leave behind, how they stop, and that they go on exactly."""

import dataclasses
import io
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from qarl.build import System, build
from qarl.checkpoint import Checkpoint, newest_checkpoint
from qarl.errors import ConfigurationError, RunError
from qarl.interrupts import Interrupted
from qarl.loop import Cast
from qarl.metrics import Last, Metrics
from qarl.recipe import Recipe, load_recipe, to_toml
from qarl.records import Advantages, Group, GroupRewards, RewardError
from qarl.run import Start, describe, dry_run, measured_alignment, open_run, summarize, train
from qarl.tracking.console import Console
from qarl.tracking.jsonl import read_lines

SMOKE = Path(__file__).resolve().parents[1] / "recipes" / "smoke.toml"
SMALL = ("--prompts_per_step=2", "--group_size=4", "--sampling.max_new_tokens=8", "--eval.count=4")


def recipe_of(*overrides: str) -> Recipe:
    return load_recipe(SMOKE, [*SMALL, *overrides])


def run_in(folder: Path, recipe: Recipe, system: System | None = None, resume: str = "auto") -> str:
    """Train; returns what the console said."""
    start = open_run(recipe, "test", folder, resume)
    stream = io.StringIO()
    train(recipe, system or build(recipe), start, Console(stream, start.step, recipe.steps))
    return stream.getvalue()


def timeless(folder: Path) -> list[dict[str, object]]:
    """Metrics without those that a clock makes."""
    rows = read_lines(folder / "metrics.jsonl")
    of_clock = ("time/", "perf/", "memory/")
    return [{key: value for key, value in row.items() if not key.startswith(of_clock)} for row in rows]


def test_a_run_leaves_everything_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = recipe_of("--steps=3")
    said = run_in(folder, recipe)
    assert load_recipe(folder / "recipe.toml") == recipe
    rows = read_lines(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert {"reward/mean", "mismatch/bit_equal", "objective/loss", "time/step", "perf/bubble"} <= set(rows[0])
    assert "eval/held_out/pass@1" in rows[0] and "eval/held_out/pass@1" not in rows[1]
    assert [row["step"] for row in read_lines(folder / "evaluations.jsonl")] == [0, 3]
    assert len((folder / "completions" / "step-2.jsonl").read_text().splitlines()) == 8
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["latest", "step-2", "step-3"]
    assert (folder / "summary.png").exists() and list((folder / "events").iterdir())
    assert "alignment measured: exact" in (folder / "run.log").read_text()
    for expected in ("model tiny", "quantized 15 of 15", "What is", "step 3/3", "held-out pass@1", str(folder)):
        assert expected in said


def test_a_stopped_run_goes_on_exactly(tmp_path: Path) -> None:
    run_in(tmp_path / "unbroken", recipe_of("--steps=4"))
    run_in(tmp_path / "stopped", recipe_of("--steps=2"))
    run_in(tmp_path / "stopped", recipe_of("--steps=4"))
    assert timeless(tmp_path / "stopped") == timeless(tmp_path / "unbroken")
    assert len({json.dumps(row) for row in timeless(tmp_path / "unbroken")}) == 4


def test_steps_past_the_checkpoint_are_run_again_and_reported_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = recipe_of("--steps=4")
    run_in(folder, recipe)
    before = timeless(folder)
    run_in(folder, recipe, resume=str(folder / "checkpoints" / "step-4"))
    start = open_run(recipe, "test", None, str(folder / "checkpoints" / "step-2"))
    assert start.step == 2
    train(recipe, build(recipe), start, Console(io.StringIO(), 2, 4))
    assert timeless(folder) == before


class SignallingLearner:
    """Sends this process a signal during one update, or fails in it."""

    def __init__(
        self, system: System, at_version: int, failure: Exception | None = None, is_under_way: bool = False
    ) -> None:
        self._learner = system.cast.learner
        self._at_version = at_version
        self._failure = failure
        self._is_under_way = is_under_way
        self.publish, self.save, self.restore = self._learner.publish, self._learner.save, self._learner.restore

    @property
    def version(self) -> int:
        return self._learner.version

    @property
    def optimizer_steps(self) -> int:
        return self._learner.optimizer_steps

    def update(self, groups: Sequence[Group], advantages: Advantages) -> Metrics:
        if self.version == self._at_version:
            if self._failure is not None:
                self._learner.optimizer_steps += self._is_under_way
                raise self._failure
            os.kill(os.getpid(), signal.SIGTERM)
        return self._learner.update(groups, advantages)


def with_learner(system: System, learner: SignallingLearner) -> System:
    cast = system.cast
    changed = type(cast)(cast.prompts, cast.engine, cast.reward, cast.advantage, learner)
    return System(changed, system.plan, system.questions, system.account)


def test_an_interrupted_run_saves_its_last_step_says_how_to_go_on_and_does(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = recipe_of("--steps=4", "--checkpoint.every=100")
    system = build(recipe)
    with pytest.raises(Interrupted, match=f"after 2 of 4 steps.*--resume {folder}"):
        run_in(folder, recipe, with_learner(system, SignallingLearner(system, at_version=1)))
    last = (folder / "run.log").read_text().splitlines()[-1]
    assert " ERROR interrupted after 2 of 4 steps" in last
    found = newest_checkpoint(folder / "checkpoints")
    assert found is not None and found.step == 2
    run_in(folder, recipe)
    run_in(tmp_path / "unbroken", recipe)
    assert timeless(folder) == timeless(tmp_path / "unbroken")


def test_a_run_that_fails_names_its_last_checkpoint_and_leaves_its_batch(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = recipe_of("--steps=4")
    system = build(recipe)
    learner = SignallingLearner(system, at_version=3, failure=RunError("gradient overflow"), is_under_way=True)
    failing = with_learner(system, learner)
    with pytest.raises(RunError, match=r"gradient overflow; .*step-2 is the last checkpoint"):
        run_in(folder, recipe, failing)
    assert (folder / "completions" / "step-3.jsonl").exists()


def test_a_failure_between_updates_loses_no_finished_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = recipe_of("--steps=4", "--checkpoint.every=100")
    system = build(recipe)
    cast = system.cast
    calls: list[int] = []

    def failing(groups: Sequence[Group]) -> list[GroupRewards]:
        calls.append(len(groups))
        if len(calls) == 4:  # one evaluation and two steps went well
            raise RunError("the reward has run out")
        return cast.reward(groups)

    broken = Cast(cast.prompts, cast.engine, failing, cast.advantage, cast.learner)
    with pytest.raises(RunError, match=r"the reward has run out; .*step-2 is the last checkpoint"):
        run_in(folder, recipe, System(broken, system.plan, system.questions, system.account))
    run_in(folder, recipe)
    run_in(tmp_path / "unbroken", recipe)
    assert timeless(folder) == timeless(tmp_path / "unbroken")


def test_too_many_errors_of_a_reward_end_the_run_with_the_sample_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    recipe = recipe_of("--steps=4", "--checkpoint.every=100", "--max_reward_error_share=0.5")
    system = build(recipe)
    cast = system.cast

    def failing(groups: Sequence[Group]) -> list[GroupRewards]:
        rewards = cast.reward(groups)
        if not (folder / "completions" / "step-1.jsonl").exists():  # two steps are to go well
            return rewards
        prompt = groups[0].prompt.id
        errors = tuple(RewardError(prompt, index, "answer", "timeout", "took longer") for index in range(4))
        return [GroupRewards(torch.full_like(one.total, math.nan), one.terms, errors) for one in rewards]

    broken = Cast(cast.prompts, cast.engine, failing, cast.advantage, cast.learner)
    with pytest.raises(RunError, match=r"8 of 8 completions have no reward, .* took longer\. .*step-2 is the last"):
        run_in(folder, recipe, System(broken, system.plan, system.questions, system.account))
    rows = [json.loads(line) for line in (folder / "completions" / "step-2.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [None] * 8
    assert [record.message for record in caplog.records if "took longer" in record.message] == [
        f"step 3: prompt {rows[0]['prompt_id']}, completion 0, reward answer: took longer (8 times)"
    ]


class Unforeseen(Exception):
    """Of a kind that qarl does not raise."""


@pytest.mark.parametrize("failure", [RunError("no room"), Unforeseen("no room"), MemoryError("no room")])
def test_a_failure_before_an_update_changes_anything_loses_no_finished_step(
    tmp_path: Path, failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    recipe = recipe_of("--steps=4", "--checkpoint.every=100")
    system = build(recipe)
    with pytest.raises(type(failure), match="no room"):
        run_in(folder, recipe, with_learner(system, SignallingLearner(system, at_version=3, failure=failure)))
    found = newest_checkpoint(folder / "checkpoints")
    assert found is not None and found.step == 3
    if not isinstance(failure, RunError):
        assert f"{found.folder} is the last checkpoint" in caplog.text


def test_a_run_that_went_back_to_an_earlier_checkpoint_goes_on_from_there_even_if_it_ends_at_once(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    recipe = recipe_of("--steps=4")
    run_in(folder, recipe)
    earlier = str(folder / "checkpoints" / "step-2")
    system = build(recipe)
    stopped = with_learner(system, SignallingLearner(system, at_version=2, failure=Unforeseen("killed")))
    start = open_run(recipe, "test", None, earlier)
    with pytest.raises(Unforeseen):
        train(recipe, stopped, start, Console(io.StringIO(), 2, 4))
    assert open_run(recipe, "test", folder, "auto").step == 2
    run_in(folder, recipe)
    assert [row["step"] for row in timeless(folder)] == [0, 1, 2, 3]


def test_a_checkpoint_past_the_last_step_is_refused(tmp_path: Path) -> None:
    run_in(tmp_path / "run", recipe_of("--steps=3"))
    with pytest.raises(ConfigurationError, match=r"steps = 2: .*step-3 is already past them"):
        open_run(recipe_of("--steps=2"), "test", tmp_path / "run", "auto")


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in(tmp_path / "run", recipe_of("--steps=2"))
    monkeypatch.setattr("qarl.run.FORMAT", 99)
    with pytest.raises(ConfigurationError, match=r"another version of qarl; .*model = '.*step-2/model'"):
        open_run(recipe_of("--steps=2"), "test", tmp_path / "run", "auto")


def test_what_a_remedy_names_may_be_changed_and_is_told(tmp_path: Path) -> None:
    run_in(tmp_path / "run", recipe_of("--steps=1"))
    changes = ("--prompts.on_long=skip", "--max_reward_error_share=0.5", "--learner.max_skipped_updates=9")
    said = run_in(tmp_path / "run", recipe_of("--steps=2", *changes, "--health.truncated.action=stop"))
    for key in ("prompts.on_long", "max_reward_error_share", "learner.max_skipped_updates", "health.truncated.action"):
        assert key in said.partition("goes on with other values of ")[2].partition("\n")[0]


def test_a_run_goes_on_with_other_servers_of_vllm_but_not_with_another_type(tmp_path: Path) -> None:
    folder, vllm = tmp_path / "run", "--engine.type=vllm"
    run_in(folder, recipe_of("--steps=1"))
    (folder / "recipe.toml").write_text(to_toml(recipe_of("--steps=1", vllm, "--engine.urls=['http://a:1']")))
    elsewhere = (
        "--engine.urls=['http://b:1']",
        "--engine.transport=disk",
        "--engine.folder=x",
        "--engine.timeout_s=9.0",
    )
    start = open_run(recipe_of("--steps=2", vllm, *elsewhere), "test", folder, "auto")
    assert set(start.changed) == {"steps", *(f"engine.{key}" for key in ("urls", "transport", "folder", "timeout_s"))}
    here = open_run(recipe_of("--steps=2", vllm, "--engine.start_timeout_s=9.0"), "test", folder, "auto")
    assert set(here.changed) == {"steps", "engine.urls", "engine.start_timeout_s"}
    with pytest.raises(ConfigurationError, match=r"other values of engine\.dtype;"):
        open_run(recipe_of("--steps=2", vllm, "--engine.dtype=float16"), "test", folder, "auto")


def test_a_sick_run_stops_with_the_reason_and_its_state_saved(tmp_path: Path) -> None:
    rule = ("--health.truncated.limit=0.0", "--health.truncated.steps=2", "--health.truncated.action=stop")
    recipe = recipe_of("--steps=4", "--checkpoint.every=100", *rule)
    said = r"stopped after step 2: answers do not end .*completion/truncated = .* for 2 steps in a row .*step-2"
    with pytest.raises(RunError, match=said):
        run_in(tmp_path / "run", recipe)
    assert [row["step"] for row in timeless(tmp_path / "run")] == [0, 1]


def test_a_sign_of_sickness_is_warned_of_once(tmp_path: Path) -> None:
    rule = ("--health.truncated.limit=0.0", "--health.truncated.steps=2", "--health.truncated.action=warn")
    said = run_in(tmp_path / "run", recipe_of("--steps=4", *rule))
    assert said.count("answers do not end within sampling.max_new_tokens") == 1


def test_an_unaligned_uncorrected_quantized_run_is_warned_of(tmp_path: Path) -> None:
    unaligned = ("--alignment=none", "--objective.type=grpo")
    assert "set objective.correction" in run_in(tmp_path / "plain", recipe_of("--steps=1", *unaligned))
    corrected = (*unaligned, "--objective.correction.type=token_tis")
    assert "set objective.correction" not in run_in(tmp_path / "corrected", recipe_of("--steps=1", *corrected))
    assert "fp8: emulated" in run_in(tmp_path / "fp8", recipe_of("--steps=1", "--scheme=fp8"))


def test_a_summary_without_a_first_evaluation_shows_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "optim/skipped": 2.0}\n{"step": 1, "optim/skipped": 1.0}\n')
    rows = [{"step": 0, "eval/other/pass@1": 0.5}, {"step": 1, "eval/held_out/pass@1": 0.75}]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = summarize(tmp_path, recipe_of())
    said = describe({**summary, "seconds": 1.0, "tracker_failures": 0, "picture": None})
    assert "held-out pass@1: 0.750 before, 0.750 after" in said
    assert "3 updates were skipped" in said
    (tmp_path / "evaluations.jsonl").write_text('{"step": 0, "eval/held_out/pass@1": null}\n' + json.dumps(rows[1]))
    assert "held_out_before" in summarize(tmp_path, recipe_of())


def test_a_failure_while_restoring_leaves_the_checkpoint_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_in(folder, recipe_of("--steps=1"))
    before = {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*.*")}
    recipe = recipe_of("--steps=2")
    system = build(recipe)
    failing = SignallingLearner(system, at_version=9)
    failing.restore = refuse_to_restore
    with pytest.raises(RunError, match="another model"):
        run_in(folder, recipe, with_learner(system, failing))
    assert {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*.*")} == before


def refuse_to_restore(folder: Path) -> None:
    raise RunError("another model")


def test_the_best_checkpoint_is_kept_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = iter([0.1, 0.9, 0.2, 0.3, 0.4])
    monkeypatch.setattr("qarl.run.evaluate", lambda *_: {"eval/held_out/pass@1": Last(next(accuracies))})
    every = ("--checkpoint.every=1", "--eval.every=1", "--checkpoint.keep_last=1", "--checkpoint.keep_best=true")
    said = run_in(tmp_path / "run", recipe_of("--steps=4", *every))
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["latest", "step-1", "step-4"]
    assert f"best checkpoint: {tmp_path / 'run' / 'checkpoints' / 'step-1'}, held-out pass@1 0.900" in said


def test_a_second_run_in_a_folder_goes_on_or_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = recipe_of("--steps=1")
    run_in(folder, recipe)
    assert open_run(recipe, "test", folder, "auto").step == 1
    with pytest.raises(ConfigurationError, match="already holds a run"):
        open_run(recipe, "test", folder, "never")
    with pytest.raises(ConfigurationError, match=r"other values of group_size, learner\.lr"):
        open_run(recipe_of("--learner.lr=1.0", "--group_size=2"), "test", folder, "auto")
    with pytest.raises(ConfigurationError, match="leave --run-dir"):
        open_run(recipe, "test", tmp_path / "other", str(folder))
    with pytest.raises(ConfigurationError, match="is no run folder"):
        open_run(recipe, "test", None, str(tmp_path / "absent"))


def test_without_a_run_dir_every_run_has_a_folder_of_its_own() -> None:
    start = open_run(recipe_of(), "smoke", None, "auto")
    assert start.checkpoint is None
    assert start.folder.path.parent == Path("runs").absolute()
    assert start.folder.path.name.startswith(time.strftime("smoke-%Y"))


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    recipe = recipe_of("--steps=2")
    start = open_run(recipe, "test", tmp_path / "run", "auto")
    stream = io.StringIO()
    answer = dry_run(recipe, build(recipe), start, Console(stream, 0, 2))
    assert answer["recipe"]["steps"] == 2
    assert "would run steps 1 to 2" in stream.getvalue()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    recipe = recipe_of("--steps=1")
    start = open_run(recipe, "test", tmp_path / "run", "auto")
    with start.folder.lock(), pytest.raises(ConfigurationError, match="in use by"):
        train(recipe, build(recipe), start, Console(io.StringIO(), 0, 1))


@pytest.mark.parametrize(
    ("rows", "level"),
    [
        ([{"mismatch/bit_equal": 1.0}, {"mismatch/bit_equal": 1.0}], "exact"),
        ([{}], "not measured"),
        ([{"mismatch/bit_equal": None}], "not measured"),
        (
            [{"mismatch/bit_equal": 1.0}, {"mismatch/bit_equal": 0.25, "mismatch/max_abs": 0.125}],
            "not exact: bit-equal 0.2500 of tokens at worst, largest difference 0.125",
        ),
        (
            [{"mismatch/bit_equal": 0.5, "mismatch/max_abs": None}, {"mismatch/max_abs": 0.125}],
            "not exact: bit-equal 0.5000 of tokens at worst, largest difference not finite",
        ),
    ],
)
def test_the_alignment_measured_is_that_of_the_worst_step(rows: list[dict[str, float]], level: str) -> None:
    assert measured_alignment(rows) == level


def test_a_summary_compares_the_first_and_last_evaluation(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.1}\n{"step": 1, "reward/mean": 0.4}\n')
    evaluations = [{"step": step, "eval/held_out/pass@1": value} for step, value in ((0, 0.1), (1, 0.3), (2, 0.9))]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluations))
    summary: Mapping[str, object] = summarize(tmp_path, recipe_of())
    assert (summary["held_out_before"], summary["held_out_after"]) == (0.1, 0.9)
    assert (summary["reward_first"], summary["reward_last"]) == (0.1, 0.4)
    said = describe({**summary, "seconds": 1.0, "tracker_failures": 1, "picture": "p.png"})
    assert "held-out pass@1: 0.100 before, 0.900 after" in said
    assert "1 trackers failed" in said


def test_a_start_without_a_checkpoint_is_step_zero(tmp_path: Path) -> None:
    assert open_run(recipe_of(), "test", tmp_path, "auto") == Start(
        open_run(recipe_of(), "x", tmp_path, "never").folder, None
    )


def test_more_steps_are_taken_up_only_where_they_change_no_learning_rate(tmp_path: Path) -> None:
    run_in(tmp_path / "run", recipe_of("--steps=1", "--learner.schedule.type=linear"))
    with pytest.raises(ConfigurationError, match="other values of steps"):
        open_run(recipe_of("--steps=2", "--learner.schedule.type=linear"), "any", tmp_path / "run", "auto")


def test_a_run_whose_checkpoints_are_all_damaged_or_gone_is_not_started_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_in(folder, recipe_of("--steps=2", "--checkpoint.every=1"))
    before = (folder / "metrics.jsonl").read_text()
    for state in (folder / "checkpoints").glob("step-*/learner.json"):
        state.write_text("{}")
    with pytest.raises(ConfigurationError, match="all its checkpoints are damaged"):
        open_run(recipe_of("--steps=2", "--checkpoint.every=1"), "any", folder, "auto")
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ConfigurationError, match="the checkpoints of 2 finished steps are gone"):
        open_run(recipe_of("--steps=2", "--checkpoint.every=1"), "any", folder, "auto")
    assert (folder / "metrics.jsonl").read_text() == before


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_in(folder, recipe_of("--steps=2", "--checkpoint.every=5"))
    shutil.rmtree(folder / "checkpoints")
    assert open_run(recipe_of("--steps=2", "--checkpoint.every=5"), "any", folder, "auto").checkpoint is None


def test_the_same_rules_in_another_order_are_another_recipe(tmp_path: Path) -> None:
    rules = ['--quant.rules."*.layers.0.*"=none', '--quant.rules."*.down_proj"=w4a8-int8']
    run_in(tmp_path / "run", recipe_of("--steps=1", *rules))
    with pytest.raises(ConfigurationError, match=r"other values of the order of quant\.rules"):
        open_run(recipe_of("--steps=2", *reversed(rules)), "any", tmp_path / "run", "auto")


def test_another_row_than_those_trained_on_last_is_noticed_too(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    options = ["--prompts.type=file", f"--prompts.path={rows}", "--prompts.eval_fraction=0.5", "--eval.count=1"]
    lines = [f'{{"prompt": "{n} + 1?", "answer": "{n + 1}"}}\n' for n in range(16)]
    rows.write_text("".join(lines))
    run_in(tmp_path / "run", recipe_of("--steps=1", *options))
    asked = (tmp_path / "run" / "completions" / "step-0.jsonl").read_text()
    unasked = next(n for n in range(0, 16, 2) if f"rows/{n}" not in asked and f'"{n} + 1?' not in asked)
    lines[unasked] = lines[unasked].replace(f'"answer": "{unasked + 1}"', '"answer": "0"')
    rows.write_text("".join(lines))
    with pytest.raises(RunError, match="no longer those that were trained on"):
        run_in(tmp_path / "run", recipe_of("--steps=2", *options))


def test_other_prompts_than_those_trained_on_are_noticed(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    options = ["--prompts.type=file", f"--prompts.path={rows}", "--prompts.eval_fraction=0.5", "--eval.count=1"]
    rows.write_text("".join(f'{{"prompt": "{n} + 1?", "answer": "{n + 1}"}}\n' for n in range(8)))
    run_in(tmp_path / "run", recipe_of("--steps=1", *options))
    rows.write_text("".join(f'{{"prompt": "{n} + 2?", "answer": "{n + 2}"}}\n' for n in range(8)))
    with pytest.raises(RunError, match="the prompts of step 1 are no longer those that were trained on"):
        run_in(tmp_path / "run", recipe_of("--steps=2", *options))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run but its log and lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("run.log", "run.lock")
    }


def test_a_refused_resume_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    keep = ("--checkpoint.every=1", "--checkpoint.keep_last=9")
    run_in(folder, recipe_of("--steps=4", *keep))
    before = contents(folder)
    recipe = recipe_of("--steps=4", *keep, "--health.empty.steps=9")
    start = open_run(recipe, "test", None, str(folder / "checkpoints" / "step-2"))
    assert start.checkpoint is not None
    other = Checkpoint(2, start.checkpoint.folder, {**start.checkpoint.metadata, "prompts": "others"}, None)
    with pytest.raises(RunError, match="the prompts of step 2 are no longer"):
        train(recipe, build(recipe), dataclasses.replace(start, checkpoint=other), Console(io.StringIO(), 2, 4))
    assert contents(folder) == before


@pytest.mark.parametrize("first", [0, 2])
def test_a_run_that_another_process_went_on_with_meanwhile_is_left_alone(tmp_path: Path, first: int) -> None:
    folder = tmp_path / "run"
    if first:
        run_in(folder, recipe_of("--steps=2"))
    recipe = recipe_of("--steps=4")
    decided = open_run(recipe, "test", folder, "auto")
    run_in(folder, recipe)
    before = contents(folder)
    with pytest.raises(ConfigurationError, match="another process has run there meanwhile"):
        train(recipe, build(recipe), decided, Console(io.StringIO(), 0, 4))
    assert contents(folder) == before


def test_lost_checkpoints_are_missed_by_the_rule_that_they_were_saved_by(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_in(folder, recipe_of("--steps=3", "--checkpoint.every=1"))
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ConfigurationError, match="the checkpoints of 3 finished steps are gone"):
        open_run(recipe_of("--steps=3", "--checkpoint.every=10"), "any", folder, "auto")


def test_signs_of_sickness_go_on_over_a_stop(tmp_path: Path) -> None:
    rule = ("--health.truncated.limit=0.0", "--health.truncated.steps=3", "--health.truncated.action=stop")
    run_in(tmp_path / "run", recipe_of("--steps=2", *rule))
    for step in (3, 4):  # and a run that is started again without other limits is stopped again
        with pytest.raises(RunError, match=rf"stopped after step {step}: .* for {step} steps in a row"):
            run_in(tmp_path / "run", recipe_of("--steps=9", *rule))
    run_in(tmp_path / "run", recipe_of("--steps=6", *rule[:2], "--health.truncated.action=off"))


def test_a_state_that_is_not_of_the_last_finished_step_is_not_saved_as_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = recipe_of("--steps=4", "--checkpoint.every=100")
    system = build(recipe)
    learner = SignallingLearner(system, at_version=2, failure=Unforeseen("late"))
    learner._learner = VersionMovesFirst(system.cast.learner)
    with pytest.raises(Unforeseen):
        run_in(folder, recipe, with_learner(system, learner))
    assert newest_checkpoint(folder / "checkpoints") is None


class VersionMovesFirst:
    """As of a batch of which every update was skipped: the version counts it, no weight changed."""

    def __init__(self, learner: Any) -> None:
        self._learner = learner
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    @property
    def optimizer_steps(self) -> int:
        return 0

    @optimizer_steps.setter
    def optimizer_steps(self, value: int) -> None:
        self._learner.version += 1


def test_completions_say_whether_they_were_trained_on(tmp_path: Path) -> None:
    run_in(tmp_path / "run", recipe_of("--steps=1", "--sampling.max_rounds=3"))
    lines = (tmp_path / "run" / "completions" / "step-0.jsonl").read_text().splitlines()
    rounds = read_lines(tmp_path / "run" / "metrics.jsonl")[0]["perf/rollout_rounds"]
    assert [len(lines), sum(json.loads(line)["trained"] for line in lines)] == [8 * rounds, 8]
