"""No text is ever encoded again: what the engine sampled is what the learner trains on."""

from pathlib import Path

import pytest

from qarl.build import build
from qarl.recipe import load_recipe

SMOKE = Path(__file__).resolve().parents[2] / "recipes" / "smoke.toml"


def test_a_step_needs_no_encoding_once_its_prompts_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(SMOKE, ["--prompts_per_step=2", "--group_size=2", "--sampling.max_new_tokens=8"])
    system = build(recipe)
    cast = system.cast
    prompts = cast.prompts.take(0, 2)
    tokenizer = cast.learner.tokenizer

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a text was encoded")

    for name in ("__call__", "encode", "_encode_plus", "apply_chat_template"):
        monkeypatch.setattr(type(tokenizer), name, refuse)
    with pytest.raises(AssertionError, match="a text was encoded"):
        tokenizer.encode("1 + 1")
    cast.engine.load(cast.learner.publish())
    groups = cast.engine.generate(prompts, 2, system.plan.sampling, (0, 0))
    rewards = cast.reward(groups)
    cast.learner.update(groups, cast.advantage([one.total for one in rewards]))
    assert cast.learner.version == 1
