"""Completions and groups from plain texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from qarl.records import Completion, FinishReason, Group, Prompt


@pytest.fixture
def make_completion() -> Callable[..., Completion]:
    def make(text: str, token_ids: Sequence[int] = (5, 6, 7), finish_reason: FinishReason = "stop") -> Completion:
        length = len(token_ids)
        ids = torch.tensor(token_ids, dtype=torch.int64)
        return Completion(ids, torch.zeros(length), torch.zeros(length, dtype=torch.int64), finish_reason, text)

    return make


@pytest.fixture
def make_prompt() -> Callable[..., Prompt]:
    def make(id: str = "sums/1", **row: Any) -> Prompt:
        return Prompt(id, (1, 2), "What is 3 + 4?", row)

    return make


@pytest.fixture
def make_group(make_completion, make_prompt) -> Callable[..., Group]:
    def make(*texts: str, id: str = "sums/1", **row: Any) -> Group:
        return Group(make_prompt(id, **row), tuple(make_completion(text) for text in texts))

    return make
