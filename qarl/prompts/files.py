"""Questions from a local file: JSON lines, JSON, CSV or Parquet, with TRL's, verl's or verifiers' columns."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from qarl.errors import ConfigurationError, printable, suggestion
from qarl.prompts.chat import Renderer
from qarl.prompts.rows import Row, find_columns
from qarl.prompts.source import FinitePrompts, SourceConfig, SplitSource


class File(SourceConfig):
    """The rows of a file; every column other than the prompt is there for rewards."""

    type: Literal["file"] = "file"
    path: str = Field(min_length=1, description="A .jsonl, .json, .csv or .parquet file.")
    eval_path: str | None = Field(default=None, description="A file of held-out rows.")
    eval_fraction: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Share of the rows held out, evenly spaced, where there is no eval_path.",
    )
    prompt_column: str | None = Field(
        default=None,
        description="Column of the prompt: a text or chat messages. Without it: `prompt`, or else verifiers' "
        "`question`.",
    )
    answer_column: str | None = Field(
        default=None,
        description="Column of the reference answer, which becomes the row's `answer`; a dot goes into nested columns. "
        "Without it: `answer`, or else verl's `reward_model.ground_truth`, if rows have one.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.eval_path is not None and self.eval_fraction > 0:
            raise ValueError("eval_path and eval_fraction both say which rows are held out; set one of them")
        if self.eval_path == self.path:
            raise ValueError("eval_path is the training file itself; set eval_fraction to hold out a share of its rows")
        return self

    @property
    def held_out_key(self) -> str | None:
        if self.eval_path is not None:
            return "eval_path"
        return "eval_fraction" if self.eval_fraction > 0 else None

    def build(self, renderer: Renderer, seed: int) -> SplitSource:
        rows = FileRows(Path(self.path), self.prompt_column, self.answer_column)
        evaluation = None
        if self.eval_path is not None:
            evaluation = FileRows(Path(self.eval_path), self.prompt_column, self.answer_column)
        return FinitePrompts(rows, renderer, seed, evaluation, self.eval_fraction)


class FileRows:
    """The rows of a file, read at once. A column that some rows lack is None there, as in a table."""

    def __init__(self, path: Path, prompt_column: str | None = None, answer_column: str | None = None) -> None:
        self.name = str(path)
        self._stem = path.stem
        self._numbered = list(_reader(path)(path))
        if not self._numbered:
            raise ConfigurationError(f"{path}: the file has no rows; write at least one, or name another file")
        rows = [columns for _, columns in self._numbered]
        self._unit = "row" if path.suffix in (".json", ".parquet") else "line"
        self._names = list(dict.fromkeys(name for columns in rows for name in columns))
        self._columns = find_columns(rows, prompt_column, answer_column)

    def __len__(self) -> int:
        return len(self._numbered)

    def row(self, index: int) -> Row:
        number, columns = self._numbered[index]
        filled = {**dict.fromkeys(self._names), **columns}
        return self._columns.row(f"{self._stem}/{number}", filled, f"{self.name}, {self._unit} {number}")


NumberedRows = Iterator[tuple[int, Mapping[str, Any]]]


def _reader(path: Path) -> Callable[[Path], NumberedRows]:
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise ConfigurationError(
            f"{path}: a file of prompts ends in {', '.join(readers)}, not {path.suffix or 'without a suffix'}; "
            "convert or rename it"
        )
    if not path.is_file():
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigurationError(
            f"{path.absolute()}: there is no such file; check the path{suggestion(path.name, beside)}"
        )
    return readers[path.suffix]


def _read_jsonl(path: Path) -> NumberedRows:
    # Not splitlines(): a JSON text may contain other line ends, such as U+2028, unescaped.
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            yield number, _object(_parse(line, f"{path}, line {number}"), f"{path}, line {number}")


def _read_json(path: Path) -> NumberedRows:
    table = _parse(_text(path), str(path))
    if not isinstance(table, list):
        raise ConfigurationError(
            f"{path}: the file holds a {type(table).__name__}; a .json file of prompts is one list of objects "
            "(one object a line is .jsonl)"
        )
    for number, value in enumerate(table, 1):
        yield number, _object(value, f"{path}, row {number}")


def _read_csv(path: Path) -> NumberedRows:
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        header = next(reader, [])
        if len(set(header)) < len(header):
            names = printable(", ".join(header))
            raise ConfigurationError(f"{path}, line 1: a column name occurs twice in {names}; rename one")
        for cells in reader:
            if cells and len(cells) != len(header):
                raise ConfigurationError(
                    f"{path}, line {reader.line_num}: {len(cells)} cells, the header names {len(header)} columns; "
                    "put cells that contain commas in quotes"
                )
            if cells:
                yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise ConfigurationError(f"{path}, line {reader.line_num}: not CSV: {error}; correct the line") from error


def _read_parquet(path: Path) -> NumberedRows:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError(
            f"{path}: reading Parquet needs pyarrow; install it with: pip install 'qarl-llm[data]'"
        ) from error
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    # ValueError: bytes that are no UTF-8, or a date that Python has no object for.
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{path}: not a readable Parquet file ({reason}); write it again") from error
    yield from enumerate(rows, 1)


def _text(path: Path) -> str:
    try:
        # utf-8-sig: spreadsheets write a byte order mark, which is not part of the first column's name.
        # newline="": line ends inside quoted cells and texts stay as they are.
        with path.open(encoding="utf-8-sig", newline="") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path}: byte {error.start} is not UTF-8 ({error.reason}); save the file as UTF-8"
        ) from error
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" at")
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise ConfigurationError(f"{where}: not JSON: {problem} at {place}; correct it there") from error
    except RecursionError as error:
        raise ConfigurationError(f"{where}: nested too deeply to be read; flatten it") from error
    # Python's own limit to the digits of an integer.
    except ValueError as error:
        raise ConfigurationError(
            f"{where}: holds a number that cannot be read ({error}); write it as a text"
        ) from error


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(
            f'{where}: a {type(value).__name__}; a row is an object such as {{"prompt": "...", "answer": "..."}}'
        )
    return value
