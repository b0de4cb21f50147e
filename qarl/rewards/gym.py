"""The verifier of a `reasoning_gym` task."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Literal

from pydantic import Field

from qarl.errors import ConfigurationError
from qarl.records import Completion, Prompt
from qarl.rewards.term import Term, column


class ReasoningGymScore(Term):
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

    def prepare(self) -> None:
        _library(self.label)

    def score(self, prompt: Prompt, completion: Completion) -> float:
        library = _library(self.label)
        task = column(prompt, "task", self.label)
        entry = column(prompt, "entry", self.label)
        settings = json.dumps(column(prompt, "task_config", self.label), sort_keys=True)
        answer = completion.text.strip()
        if self.tag:
            answer = library.utils.extract_answer(completion.text, tag_name=self.tag)
        if answer is None:
            return 0.0
        verifier = _verifier(task, settings)
        try:
            return float(verifier.score_answer(answer, entry))
        # Some verifiers parse an answer without a guard (prime_factorization: int("x")). A malformed answer is a wrong
        # one; but where the verifier cannot read the reference answer either, the fault is not the completion's.
        except ValueError:
            verifier.score_answer(entry["answer"], entry)
            return 0.0


@lru_cache(maxsize=64)
def _verifier(task: str, settings: str) -> Any:
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
