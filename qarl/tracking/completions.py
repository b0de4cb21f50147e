"""`completions/step-N.jsonl`: what the model wrote, token by token, and what it got for it.

Written before the step trains on them, so that a step that fails leaves its batch behind.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from qarl.config import Config
from qarl.records import Group, GroupRewards


class Completions:
    """One file a step, one line a completion."""

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        for step, path in step_files(folder).items():
            if step >= first_step:
                path.unlink()

    def rollout(self, step: int, groups: Sequence[Group], rewards: Sequence[GroupRewards]) -> None:
        rows = _rows(groups, rewards)
        lines = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        (self._folder / f"step-{step}.jsonl").write_text(lines, encoding="utf-8")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics have a file of their own."""

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Held-out completions are not kept."""

    def close(self) -> None:
        """Nothing is open between steps."""


class Written(Config):
    """One line of such a file: a completion of a prompt, and what it got."""

    prompt_id: str
    prompt: str
    completion: str
    reward: float | None
    trained: bool
    terms: dict[str, float | None]
    finish_reason: str
    token_ids: list[int]
    engine_logprobs: list[float]
    versions: list[int]


def step_files(folder: Path) -> dict[int, Path]:
    """The files in `folder` by their steps, ascending; a copy that somebody made, "step-1 copy.jsonl", is theirs."""
    named = {path: re.fullmatch(r"step-(\d+)", path.stem, re.ASCII) for path in folder.glob("step-*.jsonl")}
    return dict(sorted((int(name[1]), path) for path, name in named.items() if name is not None))


def read_completions(path: Path) -> tuple[list[Written], list[int]]:
    """The completions of a file, and the numbers, from 1 on, of its lines that hold none; a kill may cut the last."""
    found, damaged = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1], 1):
        try:
            written = Written.model_validate_json(line)
        except ValidationError:
            written = None
        if written is None or len(written.token_ids) != len(written.engine_logprobs):
            damaged.append(number)
        else:
            found.append(written)
    return found, damaged


def _rows(groups: Sequence[Group], rewards: Sequence[GroupRewards]) -> Iterator[dict[str, Any]]:
    for group, scored in zip(groups, rewards, strict=True):
        for index, completion in enumerate(group.completions):
            yield {
                "prompt_id": group.prompt.id,
                "prompt": group.prompt.text,
                "completion": completion.text,
                "reward": _number(scored.total, index),
                "trained": scored.is_trained,
                "terms": {name: _number(values, index) for name, values in scored.terms.items()},
                "finish_reason": completion.finish_reason,
                "token_ids": completion.token_ids.tolist(),
                "engine_logprobs": completion.engine_logprobs.tolist(),
                "versions": completion.versions.tolist(),
            }


def _number(values: Tensor, index: int) -> float | None:
    """null for a reward that could not be computed."""
    value = float(values[index])
    return value if math.isfinite(value) else None
