"""The system under measurement is one that a recipe builds, and its random work never changes."""

import pytest
import torch

from qarl.bench.system import random_prompts, system_for
from qarl.ops.operand import FloatOperand, Int4Operand, IntegerOperand
from qarl.rollout.native import NativeEngine


@pytest.mark.parametrize(
    ("scheme", "operand"), [("none", FloatOperand), ("w8a8-int8", IntegerOperand), ("w4a16", Int4Operand)]
)
def test_the_scheme_and_the_cache_are_those_asked_for(scheme: str, operand: type) -> None:
    system = system_for("tiny", scheme, 6, group_size=3, kv_cache="int8")
    engine = system.cast.engine
    assert isinstance(engine, NativeEngine)
    engine.load(system.cast.learner.publish())
    assert all(isinstance(projection.operand, operand) for projection in engine.decoder.projections())
    assert (engine.config.kv_cache, engine.config.max_concurrency, system.plan.prompts_per_step) == ("int8", 6, 2)


def test_prompts_are_the_same_random_tokens_every_time() -> None:
    first, again = (random_prompts(50, 3, 7) for _ in range(2))
    assert [prompt.token_ids for prompt in first] == [prompt.token_ids for prompt in again]
    assert len({prompt.token_ids for prompt in first}) == 3
    assert torch.tensor([prompt.token_ids for prompt in first]).shape == (3, 7)
    assert max(max(prompt.token_ids) for prompt in first) < 50
