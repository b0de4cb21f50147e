"""Files of prompts that are damaged or odd: prompts, or one line that names the file and, where it is one, the row."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl.errors import ConfigurationError
from qarl.models.tokenizer import byte_tokenizer
from qarl.prompts import File, Renderer

FUZZ = settings.get_profile("fuzz")  # of conftest.py
SECONDS = 10.0

SPOIL = Callable[[st.DataObject, Any], Any]
WITHIN = Callable[[float], AbstractContextManager[None]]

ROWS: list[dict[str, Any]] = [
    {"prompt": "1 + 1?", "answer": "2", "level": 1},
    {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2?"}], "answer": 3},
    {"prompt": "Größer als π?\nJa, „4“, oder nein?", "answer": "ja", "extra": {"a": [1, {"b": None}]}},
    {"prompt": "1 + 3?", "reward_model": {"ground_truth": "4"}, "answer": "4"},
]


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return Renderer(byte_tokenizer(), max_prompt_tokens=4096)


def written(suffix: str, rows: list[Any]) -> bytes:
    """Rows as a file of this kind; what is no row is left out of a table."""
    if suffix == ".json":
        return json.dumps(rows, ensure_ascii=False).encode("utf-8", "surrogatepass")
    if suffix == ".jsonl":
        return b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    flat = [{key: str(value) for key, value in row.items()} for row in rows if isinstance(row, dict)]
    text = io.StringIO()
    table = csv.DictWriter(text, list(dict.fromkeys(key for row in flat for key in row)))
    table.writeheader()
    table.writerows(flat)
    return text.getvalue().encode("utf-8", "surrogatepass")


def try_file(suffix: str, content: bytes, renderer: Renderer) -> None:
    """Read it as a run would: ask for prompts, and write them down."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, f"rows{suffix}")
        path.write_bytes(content)
        try:
            source = File(path=str(path)).build(renderer, seed=1)
            prompts = [prompt for step in range(2) for prompt in source.take(step, 3)]
        except ConfigurationError as error:
            assert_one_line(error, path)
        else:
            assert len(prompts) == 6
            for prompt in prompts:
                assert prompt.token_ids
                json.dumps([prompt.id, prompt.text], ensure_ascii=False).encode()


def assert_one_line(error: ConfigurationError, path: Path) -> None:
    assert "\n" not in str(error)
    assert path.name in str(error), "the message names the file"


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
@settings(FUZZ, max_examples=100 * FUZZ.max_examples)
@given(data=st.data())
def test_damaged_bytes(
    renderer: Renderer, spoil_bytes: SPOIL, within: WITHIN, suffix: str, data: st.DataObject
) -> None:
    with within(SECONDS):
        try_file(suffix, spoil_bytes(data, written(suffix, ROWS)), renderer)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
@settings(FUZZ, max_examples=100 * FUZZ.max_examples)
@given(data=st.data())
def test_rows_with_anything_in_them(
    renderer: Renderer, spoil_values: SPOIL, within: WITHIN, suffix: str, data: st.DataObject
) -> None:
    rows = spoil_values(data, ROWS)
    with within(SECONDS):
        try_file(suffix, written(suffix, rows if isinstance(rows, list) else [rows]), renderer)


@settings(FUZZ, max_examples=100 * FUZZ.max_examples)
@given(data=st.data())
def test_texts_of_any_characters(renderer: Renderer, within: WITHIN, data: st.DataObject) -> None:
    """Lone surrogates, controls, signs that other systems take for line ends."""
    texts = st.text(st.characters(), max_size=20)
    rows = data.draw(st.lists(st.fixed_dictionaries({"prompt": texts, "answer": texts}), min_size=1, max_size=3))
    with within(SECONDS):
        try_file(data.draw(st.sampled_from([".jsonl", ".json", ".csv"])), written(".jsonl", rows), renderer)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xef\xbb\xbf",
        b"\xff\xfeo\x00d\x00d\x00",
        b"\r\n\r\n",
        b"\x00" * 4096,
        b"[" * 100_000,
        b'{"prompt":' * 100_000,
        b"9" * 10_000,
        b'{"prompt": ' + b"9" * 10_000 + b"}",
        b'[{"prompt": "a", "answer": 1e999}]',
        b'{"prompt": "\\ud800", "answer": "1"}\n',
        b'{"prompt": "a\\u0000b", "answer": "1"}\n',
        b'prompt,answer\r\n"1 + 1?",2\r\n',
        b'prompt,answer\n"1 + 1?,2\n',
        b"prompt,prompt\na,b\n",
        b'prompt,answer\n"' + b"a" * 200_000 + b'",2\n',
    ],
    ids=range(16),
)
def test_files_that_people_have(renderer: Renderer, within: WITHIN, suffix: str, content: bytes) -> None:
    with within(SECONDS):
        try_file(suffix, content, renderer)


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_the_rows(renderer: Renderer, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes("\ufeffprompt,answer\r\n1 + 1?,2\r\n".encode())
    (tmp_path / "rows.jsonl").write_bytes('\ufeff{"prompt": "1 + 1?", "answer": "2"}\r\n'.encode())
    for name in ("rows.csv", "rows.jsonl"):
        (prompt,) = File(path=str(tmp_path / name)).build(renderer, seed=0).take(0, 1)
        assert (prompt.row["prompt"], prompt.row["answer"]) == ("1 + 1?", "2")
