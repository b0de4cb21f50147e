"""Questions of `reasoning_gym`: more than a hundred generators, each with its own verifier."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from qarl.errors import ConfigurationError, suggestion
from qarl.prompts.chat import Renderer
from qarl.prompts.rows import Row
from qarl.prompts.source import GeneratedPrompts, SourceConfig, SplitSource


class ReasoningGym(SourceConfig):
    """Questions of one task, drawn afresh at every step; score them with the reward `reasoning_gym`."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str = Field(min_length=1, description='Name of the task ("basic_arithmetic").')
    config: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the task, such as {min_digits = 1}; not its seed or size."
    )
    system: str | None = Field(
        default="Give the final answer between <answer> and </answer>.",
        description="System message put before every prompt.",
    )

    def build(self, renderer: Renderer, seed: int) -> SplitSource:
        return GeneratedPrompts(GymRows(self.task, self.config), renderer, seed)


class GymRows:
    """Rows with `question`, `answer`, `metadata`, and for the scorer `entry`, `task` and `task_config`."""

    def __init__(self, task: str, config: dict[str, Any]) -> None:
        self.name = f"reasoning_gym.{task}"
        self._task = task
        self._config = config
        self._check()
        self.draw(seed=0, count=1)

    def draw(self, seed: int, count: int) -> Sequence[Row]:
        import reasoning_gym

        try:
            dataset = reasoning_gym.create_dataset(self._task, seed=seed, size=count, **self._config)
            return [self._row(dataset[index]) for index in range(count)]
        # Tasks check their settings by assertions or not at all, and then fail at the first question: AttributeError
        # where a setting is a Python enumeration, which a recipe cannot hold.
        except (AssertionError, AttributeError, ValueError, TypeError) as error:
            raise ConfigurationError(
                f"prompts.config: reasoning_gym's task {self._task} refuses {self._config} ({error}); "
                "correct the settings"
            ) from error

    def _row(self, entry: dict[str, Any]) -> Row:
        scoring = {"entry": entry, "task": self._task, "task_config": self._config, "data_source": self.name}
        return Row("", entry["question"], {**entry, **scoring}, "")

    def _check(self) -> None:
        try:
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ConfigurationError(
                'prompts.type = "reasoning_gym" needs the reasoning-gym library; install it with: '
                "pip install 'qarl-llm[demo]'"
            ) from error
        if self._task not in DATASETS:
            raise ConfigurationError(
                f"prompts.task: reasoning_gym has no task {self._task!r} among its {len(DATASETS)}"
                f"{suggestion(self._task, DATASETS) or '; its gallery lists them'}"
            )
        known = {field.name for field in dataclasses.fields(DATASETS[self._task][1])} - {"seed", "size"}
        for key in self._config:
            if key not in known:
                raise ConfigurationError(
                    f"prompts.config: reasoning_gym's task {self._task} has no setting {key!r}; it has "
                    f"{', '.join(sorted(known))}{suggestion(key, known)}"
                )
