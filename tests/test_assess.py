"""`qarl eval`: what is asked of a bare model, of a file of questions, and of a run."""

import json
from pathlib import Path

import pytest

from qarl.assess import assess, assessment_recipe, questions_table
from qarl.build import build
from qarl.checkpoint import CheckpointStore
from qarl.errors import ConfigurationError
from qarl.recipe import load_recipe, parse_overrides, to_toml

SMOKE = Path(__file__).resolve().parents[1] / "recipes" / "smoke.toml"


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_bare_model_is_asked_every_question_of_a_file(questions: Path) -> None:
    found = assess("tiny", str(questions), 2, None, 1.0, ["--scheme=none", "--sampling.max_new_tokens=4"])
    assert found["eval/sums/questions"] == 3.0
    assert {"eval/sums/pass@1", "eval/sums/pass@2", "eval/sums/reward_mean"} <= set(found)
    assert (found["model"], found["scheme"], found["version"], found["checkpoint"]) == ("tiny", "none", 0, None)


def test_the_same_seed_gives_the_same_answers(questions: Path) -> None:
    asked = [assess("tiny", str(questions), 1, None, 1.0, ["--sampling.max_new_tokens=4"]) for _ in range(2)]
    assert asked[0] == asked[1]


def test_the_first_question_is_shown_as_it_is_asked(questions: Path) -> None:
    said: list[str] = []
    assess(
        "tiny",
        str(questions),
        1,
        2,
        1.0,
        ["--sampling.max_new_tokens=4", "--prompts.system=Be brief."],
        say=said.append,
    )
    assert len(said) == 1
    assert said[0].startswith("2 questions; the first one, ") and "  | <|im_start|>system\n  | Be brief." in said[0]
    assert "tokens, 257 115 121 115 116 ... " in said[0]  # <|im_start|>, s, y, s, t


def test_more_questions_than_a_file_has_are_refused(questions: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"sums.jsonl: 7 prompts at a time .* 3 are there.*--count"):
        assess("tiny", str(questions), 1, 7, 1.0, [])
    with pytest.raises(ConfigurationError, match=r"sums.jsonl: 7 prompts at a time"):
        assess("tiny", str(questions), 1, None, 1.0, ["--eval.count=7"])


def test_all_questions_of_a_file_are_those_that_are_not_too_long(questions: Path) -> None:
    with questions.open("a") as file:
        file.write(json.dumps({"prompt": "1 + " * 50 + "1?", "answer": "51"}))
    short = ["--sampling.max_new_tokens=4", "--prompts.on_long=skip", "--prompts.max_prompt_tokens=100"]
    assert assess("tiny", str(questions), 1, None, 1.0, short)["eval/sums/questions"] == 3.0
    with pytest.raises(ConfigurationError, match="4 prompts at a time are asked for, 3 are there"):
        assess("tiny", str(questions), 1, 4, 1.0, short)


def test_a_run_s_questions_of_a_file_are_put_as_in_its_training(tmp_path: Path, questions: Path) -> None:
    own = ["--prompts.system=Be brief.", "--prompts.max_prompt_tokens=77", "--prompts.on_long=skip"]
    (tmp_path / "recipe.toml").write_text(to_toml(load_recipe(SMOKE, [*own, "--prompts.chat=true"])))
    form = assessment_recipe(str(tmp_path), str(questions), None, None, None, []).prompts
    assert (form.type, form.system, form.max_prompt_tokens, form.chat) == ("file", "Be brief.", 77, True)
    changed = assessment_recipe(
        str(tmp_path), str(questions), None, None, None, parse_overrides(["--prompts.system=x"])
    )
    assert (changed.prompts.system, changed.prompts.max_prompt_tokens) == ("x", 77)


def test_a_run_without_a_system_message_is_asked_without_one(tmp_path: Path, questions: Path) -> None:
    file = f"--prompts={{type='file', path='{questions}', eval_fraction=0.4}}"
    (tmp_path / "recipe.toml").write_text(to_toml(load_recipe(SMOKE, [file])))
    assert assessment_recipe(str(tmp_path), "arithmetic", None, None, None, []).prompts.system is None
    assert assessment_recipe("tiny", "arithmetic", None, None, None, []).prompts.system is not None


def test_a_run_s_own_way_of_asking_holds_unless_another_is_given(tmp_path: Path) -> None:
    own = ["--eval.samples=4", "--eval.temperature=0.5"]
    (tmp_path / "recipe.toml").write_text(to_toml(load_recipe(SMOKE, own)))
    asked = assessment_recipe(str(tmp_path), "arithmetic", None, None, None, []).eval
    assert asked is not None and (asked.samples, asked.temperature, asked.count) == (4, 0.5, 200)
    given = assessment_recipe(str(tmp_path), None, 1, None, 0.0, []).eval
    assert given is not None and (given.samples, given.temperature, given.count) == (1, 0.0, 8)
    bare = assessment_recipe("tiny", "arithmetic", None, None, None, []).eval
    assert bare is not None and (bare.samples, bare.temperature) == (1, 1.0)


def test_a_file_gives_the_set_a_name_that_metrics_can_have(tmp_path: Path, questions: Path) -> None:
    spaced = questions.rename(tmp_path / "my sums (1).jsonl")
    asked = assessment_recipe("tiny", str(spaced), None, None, None, []).eval
    assert asked is not None and asked.name == "my_sums__1_"


def test_a_source_is_asked_by_its_name_and_settings() -> None:
    recipe = assessment_recipe("tiny", "arithmetic", 1, None, 0.0, parse_overrides(["--prompts.maximum=99"]))
    assert recipe.prompts.type == "arithmetic" and recipe.prompts.maximum == 99
    assert recipe.eval is not None
    assert (recipe.eval.count, recipe.eval.temperature, recipe.eval.name) == (200, 0.0, "arithmetic")
    assert [term.type for term in recipe.rewards] == ["answer"]


def test_a_run_is_asked_with_its_own_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(to_toml(load_recipe(SMOKE, ["--scheme=none"])))
    recipe = assessment_recipe(str(tmp_path), None, 4, 5, 1.0, [])
    assert (recipe.scheme, recipe.model) == ("none", "tiny")
    assert [term.type for term in recipe.rewards] == ["answer", "repetition"]
    assert recipe.eval is not None and (recipe.eval.count, recipe.eval.samples) == (5, 4)


def test_a_run_s_own_rule_for_right_answers_holds_and_its_checkpoints_do_not_matter(tmp_path: Path) -> None:
    own = ["--eval.correct_term=repetition", "--eval.every=1", "--checkpoint.keep_best=true"]
    (tmp_path / "recipe.toml").write_text(to_toml(load_recipe(SMOKE, own)))
    recipe = assessment_recipe(str(tmp_path), None, 1, None, 1.0, [])
    assert recipe.eval is not None
    assert (recipe.eval.correct_term, recipe.eval.count) == ("repetition", 8)
    elsewhere = assessment_recipe(str(tmp_path), "arithmetic", 1, None, 1.0, [])
    assert elsewhere.eval is not None
    assert (elsewhere.eval.correct_term, elsewhere.eval.count) == ("repetition", 200)


def test_a_task_of_reasoning_gym_is_scored_by_its_own_verifier() -> None:
    overrides = parse_overrides(["--prompts.task=basic_arithmetic"])
    recipe = assessment_recipe("tiny", "reasoning_gym", 1, 3, 1.0, overrides)
    assert [term.type for term in recipe.rewards] == ["reasoning_gym"]


def test_a_model_needs_questions_and_they_must_exist() -> None:
    with pytest.raises(ConfigurationError, match=r"no run folder .* --prompts is required"):
        assessment_recipe("tiny", None, 1, None, 1.0, [])
    with pytest.raises(ConfigurationError, match="did you mean 'arithmetic'"):
        questions_table("arithmetc")
    with pytest.raises(ConfigurationError, match="there is no such file"):
        assessment_recipe("tiny", "absent.jsonl", 1, None, 1.0, [])


def test_a_run_without_a_whole_checkpoint_is_not_asked_as_the_untrained_model(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(to_toml(load_recipe(SMOKE)))
    with pytest.raises(ConfigurationError, match="the run cannot be used, it has no checkpoint yet"):
        assess(str(tmp_path), None, 1, 2, 1.0, [])


def test_a_checkpoint_is_asked_with_its_run_s_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(SMOKE, ["--scheme=w4a8-int8"])
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    learner = build(recipe).cast.learner
    store = CheckpointStore(tmp_path / "checkpoints")
    for version in (1, 2):
        learner.version = version
        store.save(version, learner.save, {})
    found = assess(str(tmp_path / "checkpoints" / "step-1"), None, 1, 2, 1.0, ["--sampling.max_new_tokens=4"])
    assert (found["scheme"], found["version"]) == ("w4a8-int8", 1)
    assert found["checkpoint"] == str(tmp_path / "checkpoints" / "step-1")
