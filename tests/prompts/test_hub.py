from __future__ import annotations

import sys
from types import ModuleType

import pytest

from qarl.errors import ConfigurationError
from qarl.prompts.hub import HubDataset

TABLES = {
    "train": [{"question": f"What is {n} + 1 ?", "answer": str(n + 1)} for n in range(4)],
    "test": [{"question": "hello", "answer": "#### 1"}],
    "empty": [],
}


@pytest.fixture
def library(monkeypatch):
    """A stand-in for the `datasets` library: splits are lists."""

    def load_dataset(path: str, subset: str | None, split: str) -> list[dict[str, str]]:
        if (path, subset) != ("sums", "main"):
            raise FileNotFoundError(f"no {path}")
        return TABLES[split]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)


def build(make_tokenizer, **settings):
    config = HubDataset(**{"path": "sums", "subset": "main", "prompt_column": "question", **settings})
    return config.build(config.renderer(make_tokenizer()), seed=0)


def test_splits_become_training_and_held_out_prompts(library, make_tokenizer):
    source = build(make_tokenizer, eval_split="test")
    assert sorted(prompt.row["answer"] for prompt in source.take(0, 4)) == ["1", "2", "3", "4"]
    assert [prompt.id for prompt in source.held_out(1)] == ["sums/main, split test/0"]
    assert HubDataset(path="sums", eval_split="test").held_out_key == "eval_split"
    assert HubDataset(path="sums").held_out_key is None


def test_verifiers_question_is_found(library, make_tokenizer):
    assert build(make_tokenizer, prompt_column=None).take(0, 1)[0].row["answer"] in ("1", "2", "3", "4")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"path": "other"}, r"other/main, split train: cannot be loaded \(FileNotFoundError: no other\)"),
        ({"split": "empty"}, "sums/main, split empty: no rows"),
        ({"prompt_column": "prompt"}, "split train, row 0: column `prompt` is missing; the row has question, answer"),
        ({"answer_column": "solution"}, "split train, row 0: column `solution` is missing"),
    ],
)
def test_data_set_that_cannot_be_used_is_refused(library, make_tokenizer, settings, problem):
    with pytest.raises(ConfigurationError, match=problem):
        build(make_tokenizer, **settings)


def test_missing_library_names_the_extra(monkeypatch, make_tokenizer):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'qarl-llm\[data\]'"):
        build(make_tokenizer)
