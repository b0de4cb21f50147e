"""Questions from a Hugging Face data set, by the `datasets` library."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from qarl.errors import ConfigurationError
from qarl.prompts.chat import Renderer
from qarl.prompts.rows import Row, find_columns
from qarl.prompts.source import FinitePrompts, SourceConfig, SplitSource


class HubDataset(SourceConfig):
    """A split of a data set by its name on the hub; columns as in a file."""

    type: Literal["datasets"] = "datasets"
    path: str = Field(min_length=1, description='Name on the hub ("openai/gsm8k") or a local folder.')
    subset: str | None = Field(default=None, description='Configuration of the data set ("main").')
    split: str = Field(default="train", description="Split to train on.")
    eval_split: str | None = Field(default=None, description='Split of held-out rows ("test").')
    prompt_column: str | None = Field(
        default=None, description="Column of the prompt: a text or chat messages; as in a file."
    )
    answer_column: str | None = Field(
        default=None, description="Column of the reference answer, which becomes the row's `answer`; as in a file."
    )

    @property
    def held_out_key(self) -> str | None:
        return None if self.eval_split is None else "eval_split"

    def build(self, renderer: Renderer, seed: int) -> SplitSource:
        rows = self._rows(self.split)
        return FinitePrompts(rows, renderer, seed, None if self.eval_split is None else self._rows(self.eval_split))

    def _rows(self, split: str) -> HubRows:
        try:
            import datasets
        except ImportError as error:
            raise ConfigurationError(
                "prompts.type = \"datasets\" needs the datasets library; install it with: pip install 'qarl-llm[data]'"
            ) from error
        where = f"{self.path}{f'/{self.subset}' if self.subset else ''}, split {split}"
        try:
            table = datasets.load_dataset(self.path, self.subset, split=split)
        # The library raises errors of the hub, of the network, of the disk and its own; all mean the same here.
        except Exception as error:
            raise ConfigurationError(
                f"{where}: cannot be loaded ({type(error).__name__}: {error}); check prompts.path, prompts.subset, "
                "the split and the network"
            ) from error
        return HubRows(table, where, self.prompt_column, self.answer_column)


class HubRows:
    """The rows of one split; the library keeps them on disk."""

    def __init__(self, table: Any, where: str, prompt_column: str | None, answer_column: str | None) -> None:
        self.name = where
        self._table = table
        if len(table) == 0:
            raise ConfigurationError(f"{where}: no rows; name another split")
        # All rows of a data set have the same columns: the first speaks for them.
        self._columns = find_columns([table[0]], prompt_column, answer_column)

    def __len__(self) -> int:
        return len(self._table)

    def row(self, index: int) -> Row:
        return self._columns.row(f"{self.name}/{index}", self._table[index], f"{self.name}, row {index}")
