"""A run folder written by hand, and what stands in a page."""

import html
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qarl.models.tokenizer import byte_tokenizer
from qarl.recipe import load_recipe, to_toml
from qarl.records import Completion, Group, GroupRewards, Prompt
from qarl.tracking.completions import Completions
from qarl.tracking.jsonl import json_line

SMOKE = Path(__file__).resolve().parents[2] / "recipes" / "smoke.toml"

STEPS = [
    {
        "step": step,
        "completion/error_tokens": 0.0,
        "mismatch/bit_equal": 1.0,
        "mismatch/max_abs": 0.0,
        "optim/grad_norm": [2.0, 0.0, 1.0][step],
        "reward/answer": [0.0, 0.25, 0.75][step],
        "reward/mean": [0.0, 0.5, 1.0][step],
        "time/learner": 1.0,
        "time/rollout": 2.0,
        "time/step": [3.5, 4.0, 3.25][step],
    }
    for step in range(3)
]
EVALUATIONS = [
    {"step": 0, "eval/held_out/pass@1": 0.1, "eval/held_out/pass@1_low": 0.05, "eval/held_out/pass@1_high": 0.2},
    {"step": 3, "eval/held_out/pass@1": 0.9, "eval/held_out/pass@1_low": 0.8, "eval/held_out/pass@1_high": 0.95},
]
LOG = """\
2026-11-30 10:00:00,000 INFO run folder
2026-11-30 10:00:01,000 WARNING step 2: answers repeat themselves
  | and this line belongs to it
2026-11-30 10:00:02,000 INFO finished 3 steps
"""
TEXT, LOGPROBS = "ab<script>alert(1)</script>", (-0.5, -9.3, -9.2, *[-0.25] * 24)
"""exp(-9.3) is 0.91e-4 and exp(-9.2) is 1.01e-4: the second of its tokens, a byte each, is an error token."""


def write_run(folder: Path, *overrides: str, text: str = TEXT, log: str = LOG) -> Path:
    """A finished run of three steps by the model whose tokens are bytes; a step has two groups of two."""
    folder.mkdir(parents=True)
    recipe = load_recipe(SMOKE, ["--steps=3", *overrides])
    (folder / "recipe.toml").write_text(to_toml(recipe))
    (folder / "metrics.jsonl").write_text("".join(map(json_line, STEPS)))
    (folder / "evaluations.jsonl").write_text("".join(map(json_line, EVALUATIONS)))
    (folder / "run.log").write_text(log)
    tokenizer = byte_tokenizer()
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
    logprobs = torch.tensor([*LOGPROBS, *[-0.25] * len(ids)][: len(ids)])
    completion = Completion(ids, logprobs, torch.zeros_like(ids), "length", text)
    short = Completion(ids[:1], logprobs[:1], torch.zeros(1, dtype=torch.int64), "stop", tokenizer.decode(ids[:1]))
    groups = [Group(Prompt(f"sums/{one}", (1,), f"{one} + 1?", {}), (completion, short)) for one in range(2)]
    totals = torch.tensor([1.0, math.nan])
    rewards = [GroupRewards(totals, {"answer": totals}) for _ in groups]
    tracker = Completions(folder / "completions", first_step=0)
    for step in range(3):
        tracker.rollout(step, groups, rewards)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "first")


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`write_run` below the test's folder, by name."""
    return lambda name, *overrides, **options: write_run(tmp_path / name, *overrides, **options)


def figures_of(page: str) -> dict[str, Any]:
    """The figures' plotly specifications by their titles."""
    found = re.findall(
        r'<figcaption>(.*?)</figcaption>.*?<script type="application/json">(.*?)</script></figure>', page, re.DOTALL
    )
    return {html.unescape(title): json.loads(spec) for title, spec in found}


def completions_of(page: str) -> dict[str, Any]:
    """What the browser of completions is given."""
    found = re.search(r'<script type="application/json" id="completions">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))
