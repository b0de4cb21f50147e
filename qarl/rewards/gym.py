"""The verifier of a `reasoning_gym` task."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal

from pydantic import Field

from qarl.errors import ConfigurationError
from qarl.records import Completion, Prompt
from qarl.rewards.term import ForeignTerm, column, one_line


class ReasoningGymScore(ForeignTerm):
    """The task's own score, 0 to 1, of what stands in the completion's last answer tag.

    Without a tag, or with an answer that the task cannot parse, it is 0.
    """

    type: Literal["reasoning_gym"] = "reasoning_gym"
    tag: str = Field(
        default="answer", pattern="^[A-Za-z_]*$", description="Tag around the answer; empty: the whole completion."
    )

    @property
    def columns(self) -> tuple[str, ...]:
        return ("task", "entry", "task_config")

    def preload(self) -> None:
        # Where the library is missing, `prepare` says so.
        with suppress(ConfigurationError):
            self.prepare()

    def prepare(self) -> None:
        _library(self.label)

    def check(self, prompt: Prompt) -> None:
        super().check(prompt)
        entry = column(prompt, "entry", self.label)
        try:
            self._verifier(prompt).score_answer(entry["answer"], entry)
        # Tasks check what they are given in their own ways or not at all.
        except Exception as error:
            raise ConfigurationError(
                f"reward {self.label}: reasoning_gym's task {column(prompt, 'task', self.label)} cannot judge the "
                f"reference answer of prompt {prompt.id} ({type(error).__name__}: {one_line(str(error))}); correct or "
                "drop the row"
            ) from error

    def score(self, prompt: Prompt, completion: Completion) -> float:
        library = _library(self.label)
        entry = column(prompt, "entry", self.label)
        answer = completion.text.strip()
        if self.tag:
            answer = library.utils.extract_answer(completion.text, tag_name=self.tag)
        if answer is None:
            return 0.0
        verifier = self._verifier(prompt)
        try:
            return float(verifier.score_answer(answer, entry))
        # Some verifiers parse an answer without a guard (prime_factorization: int("x")). A malformed answer is a wrong
        # one; but where the verifier cannot read the reference answer either, the fault is not the completion's.
        except ValueError:
            verifier.score_answer(entry["answer"], entry)
            return 0.0

    def _verifier(self, prompt: Prompt) -> Any:
        settings = json.dumps(column(prompt, "task_config", self.label), sort_keys=True)
        return _made_verifier(column(prompt, "task", self.label), settings)


@lru_cache(maxsize=64)
def _made_verifier(task: str, settings: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=0, **json.loads(settings))


def _library(term: str) -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.utils
    except ImportError as error:
        raise ConfigurationError(
            f"reward {term} needs the reasoning-gym library; install it with: pip install 'qarl-llm[demo]'"
        ) from error
    return reasoning_gym
