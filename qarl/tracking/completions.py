"""`completions/step-N.jsonl`: what the model wrote, token by token, and what it got for it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from qarl.roles import StepReport


class Completions:
    """One file a step, one line a completion."""

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        for path in folder.glob("step-*.jsonl"):
            if int(path.stem.removeprefix("step-")) >= first_step:
                path.unlink()

    def step(self, report: StepReport) -> None:
        lines = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in _rows(report))
        (self._folder / f"step-{report.step}.jsonl").write_text(lines, encoding="utf-8")

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Held-out completions are not kept."""

    def close(self) -> None:
        """Nothing is open between steps."""


def _rows(report: StepReport) -> Iterator[dict[str, Any]]:
    for group, rewards in zip(report.groups, report.rewards, strict=True):
        for index, completion in enumerate(group.completions):
            yield {
                "prompt_id": group.prompt.id,
                "prompt": group.prompt.text,
                "completion": completion.text,
                "reward": _number(rewards.total, index),
                "terms": {name: _number(values, index) for name, values in rewards.terms.items()},
                "finish_reason": completion.finish_reason,
                "token_ids": completion.token_ids.tolist(),
                "engine_logprobs": completion.engine_logprobs.tolist(),
                "versions": completion.versions.tolist(),
            }


def _number(values: Tensor, index: int) -> float | None:
    """null for a reward that could not be computed."""
    value = float(values[index])
    return value if math.isfinite(value) else None
