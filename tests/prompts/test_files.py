from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from qarl.errors import ConfigurationError
from qarl.prompts.files import File, FileRows

ROWS = [{"prompt": "What is 3 + 4 ?", "answer": "7"}, {"prompt": "What is 1 + 1 ?", "answer": "2"}]


def write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


def read(path: Path, prompt: str = "prompt", answer: str | None = None) -> list[tuple[str, object, object]]:
    rows = FileRows(path, prompt, answer)
    found = [rows.row(index) for index in range(len(rows))]
    return [(row.id, row.content, row.columns.get("answer")) for row in found]


EXPECTED = [("sums/1", "What is 3 + 4 ?", "7"), ("sums/2", "What is 1 + 1 ?", "2")]


def test_json_lines(tmp_path):
    path = write(tmp_path / "sums.jsonl", "\n".join(map(json.dumps, ROWS)) + "\n\n")
    assert read(path) == EXPECTED


def test_line_separators_inside_a_text_do_not_end_the_line(tmp_path):
    path = write(tmp_path / "sums.jsonl", '{"prompt": "a\u2028b", "answer": "1"}\r\n')
    assert read(path) == [("sums/1", "a\u2028b", "1")]


def test_json(tmp_path):
    assert read(write(tmp_path / "sums.json", json.dumps(ROWS, indent=1))) == EXPECTED


def test_csv_with_byte_order_mark_and_quoted_line_ends(tmp_path):
    path = write(tmp_path / "sums.csv", '\ufeffprompt,answer\r\n"What, is\r\nit?",7\r\n\r\nplain,2\r\n')
    assert read(path) == [("sums/3", "What, is\r\nit?", "7"), ("sums/5", "plain", "2")]


def test_parquet_with_verls_columns(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": "What is 3 + 4 ?"}],
            "reward_model": {"style": "rule", "ground_truth": "7"},
            "extra_info": {"split": "train", "index": 0},
        }
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "sums.parquet")
    row = FileRows(tmp_path / "sums.parquet", "prompt", None).row(0)
    assert row.content == ({"role": "user", "content": "What is 3 + 4 ?"},)
    assert row.columns["answer"] == "7"
    assert row.columns["data_source"] == "sums"
    assert row.columns["extra_info"] == {"split": "train", "index": 0}


def test_bad_cells_of_a_table_are_named_by_row_and_column(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    rows = [{"prompt": "x", "answer": "1"}, {"prompt": "y", "answer": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(ConfigurationError, match=r"a.parquet, row 2: column `answer` is empty"):
        read(tmp_path / "a.parquet")
    with pytest.raises(ConfigurationError, match=r"a.csv, line 3: column `answer` is empty"):
        read(write(tmp_path / "a.csv", "prompt,answer\nx,1\ny,\n"))
    with pytest.raises(ConfigurationError, match=r"a.csv, line 2: column `prompt`: character 2 is NUL"):
        read(write(tmp_path / "a.csv", "prompt,answer\nx\0,1\n"))
    with pytest.raises(ConfigurationError, match=r"a.json, row 2: column `prompt` is of type int"):
        read(write(tmp_path / "a.json", '[{"prompt": "x"}, {"prompt": 2}]'))


def test_a_table_that_holds_no_text_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    broken = pyarrow.Array.from_buffers(
        pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")]
    )
    parquet.write_table(pyarrow.table({"prompt": broken}), tmp_path / "a.parquet")
    with pytest.raises(ConfigurationError, match=r"a.parquet: not a readable Parquet file \(.*utf-8"):
        read(tmp_path / "a.parquet")


def test_a_file_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path / "a.jsonl", "")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigurationError, match=r"a.jsonl: cannot be read .Permission denied.; check its permissions"):
        read(path)


def test_verifiers_rows_are_read_without_naming_columns(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"question": "1+1", "answer": "2", "info": {}, "task": "sums"}')
    rows = FileRows(path)
    assert (rows.row(0).content, rows.row(0).columns["answer"], rows.row(0).columns["task"]) == ("1+1", "2", "sums")


def test_named_columns(tmp_path):
    path = write(tmp_path / "sums.jsonl", '{"question": "1+1", "meta": {"solution": 2}}')
    assert read(path, "question", "meta.solution") == [("sums/1", "1+1", 2)]


def test_column_that_some_rows_lack_is_none_there(tmp_path):
    rows = FileRows(write(tmp_path / "a.jsonl", '{"prompt": "x"}\n{"prompt": "y", "hint": "h"}'), "prompt", None)
    assert [rows.row(index).columns for index in (0, 1)] == [
        {"prompt": "x", "hint": None},
        {"prompt": "y", "hint": "h"},
    ]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", "", "a.jsonl: the file has no rows"),
        ("a.csv", "prompt,answer\n", "a.csv: the file has no rows"),
        ("a.json", "[]", "a.json: the file has no rows"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": \n', "a.jsonl, line 2: not JSON: Expecting value at column 12"),
        ("a.jsonl", '{"prompt": "x"}\n["x"]', r'a.jsonl, line 2: a list; a row is an object such as \{"prompt"'),
        ("a.json", '[\n{"prompt": }]', "a.json: not JSON: Expecting value at line 2, column 12"),
        ("a.json", '{"prompt": "x"}', "the file holds a dict; a .json file of prompts is one list"),
        ("a.json", '["x"]', "a.json, row 1: a str"),
        ("a.csv", "prompt,answer\nx\n", "a.csv, line 2: 1 cells, the header names 2 columns"),
        ("a.csv", "prompt,prompt\nx,y\n", "line 1: a column name occurs twice"),
        ("a.csv", 'prompt,answer\n"x,y\n', "a.csv, line 2: not CSV: unexpected end of data"),
        ("a.parquet", "not parquet", "a.parquet: not a readable Parquet file"),
        (
            "a.jsonl",
            '{"prompt": "x"}\n{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}",
            "a.jsonl, line 2: nested too deeply",
        ),
        ("a.json", "[" * 100_000, "a.json: nested too deeply"),
        (
            "a.jsonl",
            '{"prompt": "x", "answer": ' + "9" * 5000 + "}",
            "a.jsonl, line 1: holds a number that cannot be read",
        ),
        ("a.jsonl", "\0" * 8, "a.jsonl, line 1: not JSON: Expecting value at column 1"),
        ("a.jsonl", '{"prompt": "a\0"}', "a.jsonl, line 1: not JSON: Invalid control character at column 14"),
        ("a.txt", "x", "ends in .jsonl, .json, .csv, .parquet, not .txt"),
    ],
)
def test_bad_file_is_refused_with_its_place(tmp_path, name, content, problem):
    with pytest.raises(ConfigurationError, match=problem):
        FileRows(write(tmp_path / name, content), "prompt", None)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            '{"prompt": "x"}\n{"question": "y"}',
            "a.jsonl, line 2: column `prompt` is empty; the row has question",
        ),
        ('{"text": "y"}', "a.jsonl, line 1: column `prompt` is missing; the row has text"),
        ('{"prompt": "x"}\n{"prompt": "\\ud83d"}', "a.jsonl, line 2: column `prompt`: character 1 is half of one"),
        ('{"prompt": "x"}\n{"prompt": "\\u0000"}', "a.jsonl, line 2: column `prompt`: character 1 is NUL"),
        ('{"prompt": "x", "answer": NaN}', "a.jsonl, line 1: column `answer` is nan"),
        ('{"prompt": "x", "answer": 1e400}', "a.jsonl, line 1: column `answer` is inf"),
        ('{"prompt": "x", "answer": "1"}\n\n{"prompt": "y"}', "a.jsonl, line 3: column `answer` is empty"),
    ],
)
def test_bad_row_is_found_when_the_source_is_built(tmp_path, make_tokenizer, content, problem):
    config = File(path=str(write(tmp_path / "a.jsonl", content)))
    with pytest.raises(ConfigurationError, match=problem):
        config.build(config.renderer(make_tokenizer()), seed=0)


def test_missing_file_is_refused_with_a_near_name(tmp_path):
    write(tmp_path / "train.jsonl", "")
    with pytest.raises(ConfigurationError, match=r"trian.jsonl: there is no such file.*did you mean 'train.jsonl"):
        FileRows(tmp_path / "trian.jsonl", "prompt", None)


def test_text_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(ConfigurationError, match="byte 15 is not UTF-8"):
        FileRows(tmp_path / "a.jsonl", "prompt", None)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'qarl-llm\[data\]'"):
        FileRows(write(tmp_path / "a.parquet", ""), "prompt", None)


def test_source_of_a_file_with_its_own_held_out_file(tmp_path, make_tokenizer):
    config = File(
        path=str(write(tmp_path / "train.jsonl", "\n".join(map(json.dumps, ROWS)))),
        eval_path=str(write(tmp_path / "test.jsonl", '{"prompt": "hello", "answer": "1"}')),
    )
    source = config.build(config.renderer(make_tokenizer()), seed=0)
    assert sorted(prompt.id for prompt in source.take(0, 2)) == ["train/1", "train/2"]
    assert [prompt.id for prompt in source.held_out(1)] == ["test/1"]


def test_held_out_share_of_a_file(tmp_path, make_tokenizer):
    config = File(path=str(write(tmp_path / "train.jsonl", "\n".join(map(json.dumps, ROWS)))), eval_fraction=0.5)
    source = config.build(config.renderer(make_tokenizer()), seed=0)
    assert [prompt.id for prompt in source.held_out(1) + source.take(0, 1)] == ["train/2", "train/1"]


@pytest.mark.parametrize(
    ("settings", "key"),
    [({}, None), ({"eval_fraction": 0.5}, "eval_fraction"), ({"eval_path": "b.jsonl"}, "eval_path")],
)
def test_the_key_that_holds_rows_out_is_known(settings, key):
    assert File(path="a.jsonl", **settings).held_out_key == key


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"path": "a.jsonl", "eval_path": "b.jsonl", "eval_fraction": 0.1}, "set one of them"),
        ({"path": "a.jsonl", "eval_path": "a.jsonl"}, "eval_path is the training file itself"),
    ],
)
def test_contradicting_settings_are_refused(settings, problem):
    with pytest.raises(ValidationError, match=problem):
        File.model_validate(settings)
