"""Reward functions of the user, by import path, with TRL's or verl's signature."""

from __future__ import annotations

import importlib
import importlib.util
import math
import numbers
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from qarl.errors import ConfigurationError, RunError, suggestion
from qarl.records import Completion, Group, Prompt
from qarl.rewards.term import Failure, Outcome, Term, column, failure

_NOT_TRL_COLUMNS = ("prompt", "completion", "completion_ids")


class Python(Term):
    """What a Python function says.

    trl: `f(prompts, completions, completion_ids, **columns) -> list[float]`, called once for each group; prompts and
    completions are texts, or lists of messages where the row's `prompt` is one. verl: `f(data_source, solution_str,
    ground_truth, extra_info=None) -> float` (or a dict with `score`), called for each completion.
    """

    type: Literal["python"] = "python"
    function: str = Field(
        pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_]*$",
        description='Where the function is: "package.module:function" or "folder/file.py:function".',
    )
    style: Literal["trl", "verl"] = Field(description="Signature of the function.")

    @property
    def columns(self) -> tuple[str, ...]:
        return ("data_source", "answer") if self.style == "verl" else ()

    def prepare(self) -> None:
        resolve(self.function)

    def score(self, prompt: Prompt, completion: Completion) -> float:
        """The verl style: one call, one number."""
        value = resolve(self.function)(
            data_source=column(prompt, "data_source", self.label),
            solution_str=completion.text,
            ground_truth=column(prompt, "answer", self.label),
            extra_info=prompt.row.get("extra_info"),
        )
        return as_number(value["score"] if isinstance(value, Mapping) and "score" in value else value)

    def score_group(self, group: Group) -> list[Outcome]:
        return super().score_group(group) if self.style == "verl" else self._trl_group(group)

    def _trl_group(self, group: Group) -> list[Outcome]:
        try:
            values = resolve(self.function)(**trl_arguments(group))
        except (ConfigurationError, RunError):
            raise
        # The user's code: what it raises is recorded with every completion of the group and counted.
        except Exception as error:
            return [failure(error)] * len(group.completions)
        expected = len(group.completions)
        if not isinstance(values, list | tuple | Tensor) or len(values) != expected:
            got = f"{len(values)} values" if isinstance(values, list | tuple) else f"{type(values).__name__}"
            raise RunError(
                f"reward {self.label}: {self.function} returned {got} for {expected} completions of prompt "
                f"{group.prompt.id}; it must return a list with one number for each completion"
            )
        return [_outcome(value) for value in values]


def as_number(value: object) -> float:
    """A finite float of a Python, NumPy or torch number; anything else is a TypeError or ValueError that says so."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"the function returned {value!r} ({type(value).__name__}), not a number")
    if not math.isfinite(value):
        raise ValueError(f"the function returned {value!r}; a reward must be finite")
    return float(value)


def trl_arguments(group: Group) -> dict[str, Any]:
    """The keyword arguments TRL gives: lists with one entry for each completion; every row column but the prompt."""
    row, completions = group.prompt.row, group.completions
    prompt = row.get("prompt")
    texts: list[Any] = [completion.text for completion in completions]
    if isinstance(prompt, list | tuple):
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {name: [value] * len(completions) for name, value in row.items() if name not in _NOT_TRL_COLUMNS}
    return {
        **columns,
        "prompts": [group.prompt.text if prompt is None else prompt] * len(completions),
        "completions": texts,
        "completion_ids": [completion.token_ids.tolist() for completion in completions],
    }


@lru_cache
def resolve(function: str) -> Callable[..., Any]:
    """The function behind "package.module:function" or "file.py:function"."""
    place, _, name = function.rpartition(":")
    known = vars(_module(place, function))
    if name not in known:
        raise ConfigurationError(
            f"reward function {function}: {place} has no {name}{suggestion(name, known) or '; check the name'}"
        )
    target = known[name]
    if not callable(target):
        raise ConfigurationError(
            f"reward function {function} is a {type(target).__name__}, not a function; name a function"
        )
    return target  # type: ignore[no-any-return]


def _module(place: str, function: str) -> ModuleType:
    if place.endswith(".py") and not Path(place).is_file():
        raise ConfigurationError(f"reward function {function}: {Path(place).absolute()} does not exist; check the path")
    try:
        return _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    # A module runs the user's code when imported, which may raise anything.
    except Exception as error:
        raise ConfigurationError(
            f"reward function {function}: importing {place} failed ({type(error).__name__}: {error}); install it, put "
            "its folder on PYTHONPATH, or name the file: path/to/file.py:function"
        ) from error


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"qarl_reward_{path.stem}", path)
    assert spec is not None, "a .py file always has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _outcome(value: object) -> Outcome:
    try:
        return as_number(value)
    except (TypeError, ValueError) as error:
        return Failure(str(error))
