"""The browser: which completions it holds, whose tokens, and which of them are marked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qarl.models.names import TINY_CONFIG, random_weights
from qarl.models.save import save_folder
from qarl.models.tokenizer import byte_tokenizer
from qarl.report.completions import browser, choose, evenly_spaced, token_texts
from qarl.report.history import read_runs
from qarl.tracking.completions import Written
from tests.report.conftest import LOGPROBS, TEXT, completions_of


def shown_of(run: Path, per_step: int | None = None) -> tuple[dict[str, Any], str]:
    section = browser(read_runs([run]), per_step)
    return completions_of(section.html), section.note


def written(prompt: int, length: int = 4) -> Written:
    return Written(
        prompt_id=str(prompt), prompt="", completion="", reward=0.0, trained=True, terms={}, finish_reason="stop",
        token_ids=[0] * length, engine_logprobs=[0.0] * length, versions=[0] * length,
    )  # fmt: skip


def places(chosen: list[tuple[int, Written]]) -> list[int]:
    return [place for place, _ in chosen]


def test_a_completion_is_shown_token_by_token(run: Path):
    found, note = shown_of(run)
    (only,) = found["runs"]
    first, second = only["steps"][1]["completions"][:2]
    assert "".join(only["texts"][str(token)] for token in first["ids"]) == TEXT
    assert first["logprobs"] == list(LOGPROBS)
    assert (first["reward"], first["terms"], first["finish"], first["length"]) == (1.0, {"answer": 1.0}, "length", 27)
    assert (second["reward"], second["terms"], second["finish"]) == (None, {"answer": None}, "stop")
    assert only["prompts"] == [["sums/0", "0 + 1?"], ["sums/1", "1 + 1?"]]
    assert note == "first: 12 of the 12 completions of 3 of 3 steps."


def test_error_tokens_are_those_below_the_metrics_threshold_and_no_others(run: Path):
    found, _ = shown_of(run)
    completions = [one for step in found["runs"][0]["steps"] for one in step["completions"]]
    assert [one["errors"] for one in completions] == [[1], [], [1], []] * 3


def test_where_repetition_begins_is_found(make_run: Callable[..., Path]):
    found, _ = shown_of(make_run("a", text="abcdabcd"))
    assert found["runs"][0]["steps"][0]["completions"][0]["onset"] == 4
    found, _ = shown_of(make_run("b", text="abcdabc"))
    assert found["runs"][0]["steps"][0]["completions"][0]["onset"] is None


def test_what_a_model_wrote_stays_text(run: Path):
    html = browser(read_runs([run]), None).html
    assert "alert(1)" not in html  # in single bytes, which the page joins as text
    (run / "recipe.toml").write_text((run / "recipe.toml").read_text().replace('"tiny"', '"gone/away.gguf"'))
    html = browser(read_runs([run]), None).html
    assert "\\u003cscript>alert(1)\\u003c/script>" in html
    assert "<script>alert" not in html


def test_without_the_tokenizer_the_page_says_that_it_shows_whole_texts(run: Path):
    (run / "recipe.toml").write_text((run / "recipe.toml").read_text().replace('"tiny"', '"gone/away.gguf"'))
    found, note = shown_of(run)
    assert "first: whole texts only, without their tokens, for 'gone/away.gguf' is no model" in note
    only = found["runs"][0]
    assert only["texts"] is None
    one = only["steps"][0]["completions"][0]
    assert (one["text"], one["errors"], "ids" in one) == (TEXT, [1], False)


def test_another_tokenizer_than_the_runs_is_not_used(run: Path, tmp_path: Path):
    file = run / "completions" / "step-0.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**row, "completion": "another text"}) + "\n" for row in rows))
    found, note = shown_of(run)
    assert "the tokenizer found now decodes them to other texts than the run wrote" in note
    assert found["runs"][0]["texts"] is None


def test_the_tokenizer_beside_a_checkpoints_model_goes_first(run: Path):
    (run / "recipe.toml").write_text((run / "recipe.toml").read_text().replace('"tiny"', '"gone/away.gguf"'))
    save_folder(run / "checkpoints" / "step-3" / "model", TINY_CONFIG, random_weights(TINY_CONFIG, 0), byte_tokenizer())
    assert shown_of(run)[0]["runs"][0]["texts"]["97"] == "a"


def test_signs_of_several_tokens_come_as_a_whole_too(make_run: Callable[..., Path]):
    one = shown_of(make_run("a", text="é"))[0]["runs"][0]["steps"][0]["completions"][0]
    assert (len(one["ids"]), one["text"]) == (2, "é")


def test_a_sample_is_said_to_be_one(run: Path):
    found, note = shown_of(run, per_step=2)
    assert [len(step["completions"]) for step in found["runs"][0]["steps"]] == [2, 2, 2]
    assert note == "first: 6 of the 12 completions of 3 of 3 steps; --completions N shows N of every step."


def test_a_run_without_completions_says_so(run: Path):
    for file in (run / "completions").iterdir():
        file.unlink()
    section = browser(read_runs([run]), None)
    assert (section.html, section.note) == ("", f"first: there are no files in {run / 'completions'}.")


def test_damaged_lines_are_named(run: Path):
    with (run / "completions" / "step-2.jsonl").open("a") as file:
        file.write('{"prompt_id": "sums/9"}\n')
    _, note = shown_of(run)
    assert f"{run / 'completions' / 'step-2.jsonl'}: damaged lines are passed over: 5." in note


def test_steps_are_spaced_evenly_with_both_ends():
    assert evenly_spaced(range(100), 4) == [0, 33, 66, 99]
    assert evenly_spaced([3, 5], 4) == [3, 5]
    assert evenly_spaced([3, 5], 1) == [3]


@pytest.mark.parametrize(
    ("most", "budget", "expected"),
    [
        (None, None, [0, 1, 2, 3, 4, 5, 6, 7]),
        (4, None, [0, 1, 6, 7]),  # two of the four groups of two: the first and the last
        (3, None, [0, 1, 6]),
        (1, None, [0]),
        (None, 16, [0, 1, 6, 7]),  # 4 tokens each
        (None, 1, [0]),
    ],
)
def test_whole_groups_are_chosen_as_far_as_they_fit(most: int | None, budget: int | None, expected: list[int]):
    assert places(choose([written(prompt) for prompt in (0, 0, 1, 1, 2, 2, 3, 3)], most, budget)) == expected


def test_a_leading_space_belongs_to_its_token():
    class Stripping:
        """As SentencePiece decodes: the first token of a text loses its space."""

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [0]

        def decode(self, ids: list[int], **options: Any) -> str:
            return "".join(["a", " b"][one] for one in ids).lstrip()

    assert token_texts(Stripping(), [1, 0, 1]) == {0: "a", 1: " b"}
