"""What people get wrong, through the command line: one line that says what, where and the remedy, and nothing lost."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from qarl.cli import run_command
from qarl.tracking.jsonl import read_lines

SMOKE = str(Path(__file__).resolve().parents[1] / "recipes" / "smoke.toml")

FILE = ("--prompts.type=file", "--prompts_per_step=1", "--eval.count=1", "--prompts.eval_fraction=0.4")
PYTHON = ("--rewards.0.type=python", "--rewards.0.style=trl")

REWARDS = '''
from pathlib import Path

HERE = Path(__file__).parent

def lengths(prompts, completions, completion_ids, **columns):
    return [len(ids) / 100 for ids in completion_ids]

def too_few_later(prompts, completions, completion_ids, **columns):
    """Well behaved for an evaluation of one question and two steps of two prompts, until someone mends it."""
    with (HERE / "calls").open("a+") as file:  # calls may come in several processes
        file.write("x")
        calls = file.tell()
    values = lengths(prompts, completions, completion_ids)
    return values if calls <= 5 or (HERE / "mended").exists() else values[1:]
'''

ROWS = {
    "good.jsonl": [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "1 + 2?", "answer": "3"}],
    "no_prompt.jsonl": [{"prompt": "1 + 1?", "answer": "2"}, {"question": "1 + 2?", "answer": "3"}],
    "no_answer.jsonl": [{"prompt": "1 + 1?", "reply": "2"}, {"prompt": "1 + 2?", "reply": "3"}],
    "long.jsonl": [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "1 + 2? " * 30, "answer": "3"}],
}


@dataclass(frozen=True)
class Refusal:
    """A wrong command: what is typed, and the parts its line must have: where, what, and the remedy."""

    typed: tuple[str, ...]
    where: str
    what: str
    remedy: str


REFUSALS = {
    "unknown key": Refusal(
        ("--learner.lrr=1e-5",), "command line: learner.lrr", "unknown key", "did you mean 'lr'? known: lr,"
    ),
    "unknown table": Refusal(("--lerner.lr=1e-5",), "command line: lerner", "unknown key", "did you mean 'learner'?"),
    "wrong type": Refusal(
        ("--steps=many",), "command line: steps = 'many'", "must be a valid integer", "(Rollout batches to train on.)"
    ),
    "value in place of a table": Refusal(
        ("--objective=grpo",),
        "command line: objective = 'grpo'",
        "must be a table of keys",
        "write objective.type = 'grpo'",
    ),
    "prompt column missing": Refusal(
        (*FILE, "--prompts.path=no_prompt.jsonl"),
        "no_prompt.jsonl, line 2",
        "column `prompt` is empty; the row has answer, question",
        "name another with prompts.prompt_column",
    ),
    "answer column missing": Refusal(
        (*FILE, "--prompts.path=no_answer.jsonl"),
        "prompt no_answer/1",
        "column `answer` is missing",
        "name it with prompts.answer_column",
    ),
    "no such file": Refusal(
        (*FILE, "--prompts.path=god.jsonl"), "god.jsonl", "there is no such file", "did you mean 'good.jsonl'"
    ),
    "prompt too long": Refusal(
        (*FILE, "--prompts.path=long.jsonl", "--prompts.max_prompt_tokens=200"),
        "long.jsonl, line 2",
        "tokens, the limit is 200",
        "raise prompts.max_prompt_tokens, or set prompts.on_long",
    ),
    "context too short": Refusal(
        ("--sampling.max_new_tokens=5000",),
        "sampling.max_new_tokens = 5000",
        "exceed the model's context of 2048 tokens",
        "lower one of them",
    ),
    "greedy training": Refusal(
        ("--sampling.temperature=0",),
        "command line: sampling.temperature = 0",
        "must be greater than or equal to 0.01",
        "is not a policy to train",
    ),
    "group of one": Refusal(
        ("--group_size=1",),
        "smoke.toml with the command line",
        "group_size = 1 with advantage.type = 'group_std'",
        "set group_size to 2 or more, or advantage.type = 'none'",
    ),
    "unknown scheme": Refusal(
        ("--scheme=w8a8",), "command line: scheme", "unknown scheme 'w8a8'", "did you mean 'w8a8-int8'?"
    ),
    "pattern that matches nothing": Refusal(
        ('--quant.rules."*.q_prj"=none',),
        '[quant.rules] "*.q_prj"',
        "matches no linear module",
        "model.layers.*.self_attn.q_proj",
    ),
    "unknown model": Refusal(("--model=tinny",), "'tinny'", "is no model", "did you mean 'tiny'?"),
    "reward function missing": Refusal(
        (*PYTHON, "--rewards.0.function=rewards.py:length"),
        "reward function rewards.py:length",
        "rewards.py has no length",
        "did you mean 'lengths'?",
    ),
    "reward file missing": Refusal(
        (*PYTHON, "--rewards.0.function=reward.py:lengths"), "reward.py:lengths", "does not exist", "check the path"
    ),
    "warm-up longer than the run": Refusal(
        ("--learner.schedule.warmup_steps=9",),
        "learner.schedule.warmup_steps = 9",
        "more than the 5 steps of the run",
        "lower it or train longer",
    ),
    "several updates without a ratio": Refusal(
        ("--objective.type=reinforce", "--learner.updates_per_batch=2"),
        "learner.updates_per_batch = 2",
        "with objective.type = 'reinforce'",
        "set learner.updates_per_batch = 1, or objective.type = 'grpo'",
    ),
}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data files and reward functions, where the commands are typed."""
    for name, rows in ROWS.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=list(REFUSALS))
def test_it_is_refused_in_one_line_before_anything_is_written(
    desk: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    before = sorted(desk.iterdir())
    code = run_command(["train", SMOKE, "--run-dir", "run", *refusal.typed])
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert said.err.count("\n") == 1 and said.err.startswith("qarl: ")
    for part in (refusal.where, refusal.what, refusal.remedy):
        assert part in said.err
    assert [path for path in sorted(desk.iterdir()) if path.name != "__pycache__"] == before


def test_what_a_refusal_suggests_works(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command lines, mended."""
    mended = (*FILE, *PYTHON, "--prompts.path=good.jsonl", "--rewards.0.function=rewards.py:lengths")
    assert run_command(["train", SMOKE, "--dry-run", "--scheme=w8a8-int8", *mended]) == 0
    assert capsys.readouterr().err == ""


def test_a_reward_that_returns_too_few_values_ends_the_run_and_loses_nothing(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    function = (*PYTHON, f"--rewards.0.function={desk / 'rewards.py'}:too_few_later")
    sizes = ("--steps=4", "--prompts_per_step=2", "--eval.count=1", "--checkpoint.every=100")
    command = ["train", SMOKE, "--run-dir", "run", *function, *sizes]
    assert run_command(command) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "8 of 8 completions have no reward" in error
    assert "prompt arithmetic/2-0, completion 0, reward python: returned 3 values for 4 completions" in error
    assert f"{Path('run', 'checkpoints', 'step-2')} is the last checkpoint" in error
    assert [row["step"] for row in read_lines(desk / "run" / "metrics.jsonl")] == [0, 1]

    (desk / "mended").touch()
    assert run_command(command) == 0
    assert run_command([*command[:3], "unbroken", *command[4:]]) == 0
    for step in range(4):
        name = f"step-{step}.jsonl"
        completions = [(desk / run / "completions" / name).read_text() for run in ("run", "unbroken")]
        assert completions[0] == completions[1]


def test_every_problem_of_a_recipe_has_its_line(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["train", SMOKE, "--stepz=3", "--learner.lr=fast"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "learner.lr = 'fast'" in "".join(lines) and "stepz = 3" in "".join(lines)
