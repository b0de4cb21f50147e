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

from torch import Tensor

from qarl.records import Group, GroupRewards


class Completions:
    """One file a step, one line a completion."""

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        for path in folder.glob("step-*.jsonl"):
            # A copy that somebody made, "step-1 copy.jsonl", is theirs.
            ours = re.fullmatch(r"step-(\d+)", path.stem, re.ASCII)
            if ours is not None and int(ours[1]) >= first_step:
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
