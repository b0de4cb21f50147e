"""Where questions come from, and how they are rendered and ordered."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from qarl.prompts.arithmetic import Arithmetic
from qarl.prompts.chat import Renderer, Tokenizer, describe_prompt
from qarl.prompts.files import File
from qarl.prompts.gym import ReasoningGym
from qarl.prompts.hub import HubDataset
from qarl.prompts.source import FinitePrompts, SourceConfig, SplitSource

PromptsConfig = Annotated[Arithmetic | File | HubDataset | ReasoningGym, Field(discriminator="type")]

SOURCES: dict[str, type[Arithmetic] | type[File] | type[HubDataset] | type[ReasoningGym]] = {
    "arithmetic": Arithmetic,
    "file": File,
    "datasets": HubDataset,
    "reasoning_gym": ReasoningGym,
}

__all__ = [
    "SOURCES",
    "PromptsConfig",
    "SourceConfig",
    "SplitSource",
    "FinitePrompts",
    "Renderer",
    "Tokenizer",
    "describe_prompt",
    "Arithmetic",
    "File",
    "HubDataset",
    "ReasoningGym",
]
