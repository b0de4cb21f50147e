"""Reward functions of the user, by import path, with TRL's or verl's signature."""

from __future__ import annotations

import asyncio
import copy
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from qarl.errors import ConfigurationError, suggestion
from qarl.records import Completion, Group, Prompt
from qarl.rewards.term import ForeignTerm, InvalidValue, Outcome, as_number, column, failure

_NOT_TRL_COLUMNS = ("prompt", "completion", "completion_ids")

_ONLY_IN_TRL = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL's trainer gives and nobody else can."""


class Python(ForeignTerm):
    """What a Python function says; it may be `async`.

    trl: `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, called once for each group; prompts
    and completions are texts, or lists of messages where the row's `prompt` is one; None where the function does not
    apply. verl: `f(data_source, solution_str, ground_truth, extra_info=None) -> float` (or a dict with `score`), called
    for each completion.
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

    def check(self, prompt: Prompt) -> None:
        super().check(prompt)
        arguments = trl_arguments(Group(prompt, ())) if self.style == "trl" else self._verl_arguments(prompt, "")
        try:
            inspect.signature(resolve(self.function)).bind(**arguments)
        except TypeError as error:
            raise ConfigurationError(
                f"reward {self.label}: {self.function} cannot be called for prompt {prompt.id}, {error}; it is given "
                f"{', '.join(arguments)} by name: take what it does not need as **columns, give the rest a default"
            ) from error

    def calls(self, group: Group) -> list[Group]:
        return [group] if self.style == "trl" else super().calls(group)

    def score(self, prompt: Prompt, completion: Completion) -> Any:
        """The verl style: one call, one number."""
        value = self._call(self._verl_arguments(prompt, completion.text))
        return value["score"] if isinstance(value, Mapping) and "score" in value else value

    def score_group(self, group: Group) -> list[Outcome]:
        return super().score_group(group) if self.style == "verl" else self._trl_group(group)

    def _trl_group(self, group: Group) -> list[Outcome]:
        values = self._call(trl_arguments(group))
        expected = len(group.completions)
        if not isinstance(values, list | tuple | Tensor | np.ndarray):
            raise InvalidValue(f"returned {values!r} ({type(values).__name__}), not a list of {expected} numbers")
        if len(values) != expected:
            raise InvalidValue(f"returned {len(values)} values for {expected} completions")
        return [_outcome(value) for value in values]

    def _verl_arguments(self, prompt: Prompt, text: str) -> dict[str, Any]:
        return {
            "data_source": column(prompt, "data_source", self.label),
            "solution_str": text,
            "ground_truth": column(prompt, "answer", self.label),
            "extra_info": prompt.row.get("extra_info"),
        }

    def _call(self, arguments: Mapping[str, Any]) -> Any:
        try:
            value = resolve(self.function)(**arguments)
            return asyncio.run(value) if inspect.iscoroutine(value) else value
        except KeyError as error:
            if error.args and error.args[0] in _ONLY_IN_TRL:
                raise ConfigurationError(
                    f"reward {self.label}: {self.function} reads `{error.args[0]}`, which only TRL's trainer can give; "
                    "make it do without"
                ) from error
            raise


def trl_arguments(group: Group) -> dict[str, Any]:
    """The keyword arguments TRL gives: lists with one entry for each completion; every row column but the prompt.

    Each entry is a copy, so that changing one changes no other.
    """
    row, count = group.prompt.row, len(group.completions)
    prompt = row.get("prompt")
    texts: list[Any] = [completion.text for completion in group.completions]
    if isinstance(prompt, list | tuple):
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {name: _copies(value, count) for name, value in row.items() if name not in _NOT_TRL_COLUMNS}
    return {
        **columns,
        "prompts": _copies(group.prompt.text if prompt is None else prompt, count),
        "completions": texts,
        "completion_ids": [completion.token_ids.tolist() for completion in group.completions],
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


def _copies(value: Any, count: int) -> list[Any]:
    return [copy.deepcopy(value) for _ in range(count)]


def _outcome(value: object) -> Outcome:
    try:
        return None if value is None else as_number(value)
    except InvalidValue as error:
        return failure(error)
