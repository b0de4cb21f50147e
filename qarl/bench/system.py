"""What is measured: a model with its engine and learner in one scheme, and random work for it."""

from __future__ import annotations

import torch

from qarl.build import System, build
from qarl.recipe import parse_recipe
from qarl.records import Prompt
from qarl.rollout.cache import KVFormat


def system_for(
    model: str,
    scheme: str,
    batch: int,
    *,
    group_size: int = 1,
    new_tokens: int = 32,
    alignment: str = "auto",
    kv_cache: KVFormat = "fp32",
) -> System:
    """Engine and learner for `batch` completions at a time, as a recipe would build them."""
    table = {
        "model": model,
        "scheme": scheme,
        "alignment": alignment,
        "prompts_per_step": batch // group_size,
        "group_size": group_size,
        "prompts": {"type": "arithmetic"},
        "rewards": [{"type": "answer"}],
        "advantage": {"type": "group_std" if group_size > 1 else "none"},
        "sampling": {"max_new_tokens": new_tokens},
        "engine": {"type": "native", "max_concurrency": batch, "kv_bytes": 4 << 30, "kv_cache": kv_cache},
        "learner": {"lr": 1e-30},  # weights that do not move: the same tokens may be trained again
    }
    return build(parse_recipe(table, "command line"))


def random_prompts(vocab_size: int, count: int, length: int) -> list[Prompt]:
    """Different prompts of random tokens, the same every time."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (count, length), generator=generator)
    return [Prompt(f"random/{i}", tuple(row), "", {}) for i, row in enumerate(tokens.tolist())]
