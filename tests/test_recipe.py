"""Recipes: strict, overridable, and said in one line when wrong."""

import tomllib
from pathlib import Path

import pytest

from qarl.errors import ConfigurationError
from qarl.objectives import Grpo, Tbpo
from qarl.recipe import (
    Override,
    Recipe,
    changed_keys,
    load_recipe,
    overrides_of,
    parse_overrides,
    parse_recipe,
    to_toml,
)
from qarl.rollout.config import NativeEngineConfig, VllmEngineConfig

RECIPES = Path(__file__).resolve().parents[1] / "recipes"

SMALL = """
model = "tiny"
[prompts]
type = "arithmetic"
[[rewards]]
type = "answer"
[objective]
type = "tbpo"
cap = 3.0
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_a_recipe_is_read_with_its_defaults(small: Path) -> None:
    recipe = load_recipe(small)
    assert (recipe.model, recipe.scheme, recipe.alignment) == ("tiny", "w8a8-int8", "auto")
    assert recipe.objective == Tbpo(cap=3.0)
    assert recipe.eval is None


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.toml")), ids=lambda path: path.name)
def test_every_recipe_we_ship_is_valid(path: Path) -> None:
    assert load_recipe(path).steps >= 1


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.toml")), ids=lambda path: path.name)
def test_a_resolved_recipe_reads_back_as_itself(path: Path) -> None:
    recipe = load_recipe(path)
    assert parse_recipe(tomllib.loads(to_toml(recipe)), "resolved") == recipe


def test_overrides_are_toml_values(small: Path) -> None:
    recipe = load_recipe(small, ["--learner.lr=1e-5", "--steps", "7", "--model=./other", "--rewards.0.weight=2"])
    assert recipe.learner.lr == 1e-5
    assert recipe.steps == 7
    assert recipe.model == "./other"
    assert recipe.rewards[0].weight == 2.0


def test_an_override_may_add_a_table_to_a_list(small: Path) -> None:
    recipe = load_recipe(small, ["--rewards.1.type=repetition", "--rewards.1.weight=0.5"])
    assert [(term.type, term.weight) for term in recipe.rewards] == [("answer", 1.0), ("repetition", 0.5)]


def test_another_type_starts_its_table_afresh_wherever_it_stands_on_the_command_line(small: Path) -> None:
    recipe = load_recipe(small, ["--objective.clip_ratio_high=0.28", "--objective.type=grpo"])
    assert recipe.objective == Grpo(clip_ratio_high=0.28)


def test_the_same_type_keeps_its_table(small: Path) -> None:
    assert load_recipe(small, ["--objective.type=tbpo"]).objective == Tbpo(cap=3.0)


def test_a_table_that_is_left_out_is_overridden_from_its_default(small: Path) -> None:
    recipe = load_recipe(small, ["--learner.optimizer.weight_decay=0.1"])
    assert recipe.learner.optimizer.type == "adamw"
    assert recipe.learner.optimizer.weight_decay == 0.1


def test_a_module_pattern_is_quoted(small: Path) -> None:
    recipe = load_recipe(small, ['--quant.rules."*.o_proj"=none'])
    assert recipe.quant.rules == {"*.o_proj": "none"}


def test_overrides_are_split_at_dots_outside_quotes() -> None:
    assert parse_overrides(['--a."b.c".0=[1, 2]', "--d", "2024-01-01"]) == [
        Override(("a", "b.c", "0"), [1, 2]),
        Override(("d",), "2024-01-01"),
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--sampling.temperature=0", "command line: sampling.temperature = 0: must be greater than or equal to 0.01"),
        ("--learner.lrr=1", "command line: learner.lrr = 1: unknown key; did you mean 'lr'?"),
        ("--scheme=w8a8int8", "did you mean 'w8a8-int8'"),
        ("--alignment=maybe", "command line: alignment = 'maybe': not a known value; known: auto, none"),
        ("--objective.type=tpbo", "unknown type 'tpbo'; did you mean 'tbpo'?"),
        ("--sampling.top_p=0.9", "would be another policy; remove the key"),
        ("--steps=2.5", "command line: steps = 2.5: must be a valid integer"),
        ("--group_size=1", "set group_size to 2 or more, or advantage.type = 'none'"),
        ("--learner.updates_per_batch=3", "does not divide prompts_per_step = 8"),
        ("--learner.schedule.warmup_steps=101", "warmup_steps = 101 is more than the 100 steps of the run; lower it"),
        ("--checkpoint.keep_best=true", "nothing says which is best; set eval.every"),
        ("--rewards.2.type=length", "'2' is no position in a list of 1; count from 0"),
        ("--model.name=x", "model is a value and has no keys of its own"),
        ("--eval.correct_term=ansr", "is no reward term; did you mean 'answer'?"),
        (
            "--prompts={type='file', path='a.jsonl', eval_fraction=0.1}",
            "prompts.eval_fraction holds questions out that",
        ),
        ("--prompts={type='file', path='a.jsonl', eval_path='b.jsonl'}", "prompts.eval_path holds questions out that"),
        (
            "--prompts={type='datasets', path='a', eval_split='b'}",
            "prompts.eval_split holds questions out that nothing",
        ),
        ("--learner.lr=nan", "must be a finite number"),
        ("--engine.type=vlm", "with the command line: engine: unknown type 'vlm'; did you mean 'vllm'?"),
        ("--engine={type='vllm', kv_cache='int8'}", "command line: engine.kv_cache = 'int8': unknown key"),
        ("--engine={type='vllm', transport='disk'}", "set a folder for 'disk', and only then"),
        ("--engine={type='vllm', urls=['http://a', 'http://a']}", "urls names a server twice"),
        ("--engine.urls=['http://a']", "command line: engine.urls = ['http://a']: unknown key"),
        ("steps=3", "steps=3: is no option"),
        ("--steps", "--steps: has no value"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(small: Path, override: str, message: str) -> None:
    found = refusal(small, override)
    assert message in found
    assert "\n" not in found


def test_a_problem_of_the_file_names_the_file_and_the_key(small: Path) -> None:
    small.write_text(SMALL.replace("cap = 3.0", "cap = -1.0"))
    assert refusal(small).startswith(f"{small}: objective.cap = -1.0: must be greater than 0")


def test_all_problems_are_reported_at_once(small: Path) -> None:
    small.write_text("stepz = 3\n" + SMALL.replace("cap", "cup"))
    found = refusal(small).splitlines()
    assert len(found) == 2
    assert "stepz" in "".join(found) and "objective.cup" in "".join(found)


@pytest.mark.parametrize(
    ("asked_every", "saved_every", "rated_every"), [(3, 2, 6), (7, 10, 70), (10, 25, 50), (5, 10, 0), (20, 10, 0)]
)
def test_the_best_checkpoint_needs_steps_that_are_both_asked_and_saved(
    small: Path, asked_every: int, saved_every: int, rated_every: int
) -> None:
    keys = (
        "--checkpoint.keep_best=true", f"--eval.every={asked_every}", f"--checkpoint.every={saved_every}"
    )  # fmt: skip
    if rated_every:
        assert f"only checkpoints of every {rated_every} steps would be rated" in refusal(small, *keys)
    else:
        assert load_recipe(small, keys).checkpoint.keep_best
    assert not load_recipe(small, keys[1:]).checkpoint.keep_best


def test_questions_that_are_held_out_may_be_asked(small: Path) -> None:
    held_out = "--prompts={type='file', path='a.jsonl', eval_fraction=0.1}"
    assert load_recipe(small, [held_out, "--eval.count=5"]).prompts.held_out_key == "eval_fraction"


def test_greedy_held_out_answers_are_asked_for_once(small: Path) -> None:
    assert "greedy answers are all the same" in refusal(small, "--eval.temperature=0", "--eval.samples=4")
    assert "eval: samples = 4 with temperature = 0" in refusal(small, "--eval.temperature=0", "--eval.samples=4")
    once = load_recipe(small, ["--eval.temperature=0"]).eval
    assert once is not None and once.samples == 1


def test_several_updates_a_batch_need_an_objective_with_a_ratio(small: Path) -> None:
    found = refusal(small, "--objective.type=reinforce", "--learner.updates_per_batch=2")
    assert "no ratio that follows the policy" in found and "objective.type = 'grpo'" in found
    assert load_recipe(small, ["--objective.type=reinforce"]).objective.type == "reinforce"
    assert load_recipe(small, ["--learner.updates_per_batch=2"]).learner.updates_per_batch == 2


@pytest.mark.parametrize("term", ["--objective.entropy_coef=0.01", "--objective.kl.coef=0.01"])
def test_equal_groups_are_not_skipped_where_they_have_a_gradient(small: Path, term: str) -> None:
    found = refusal(small, "--learner.skip_equal_groups=true", term)
    assert "groups of equal rewards have a gradient then" in found
    assert load_recipe(small, ["--learner.skip_equal_groups=true"]).learner.skip_equal_groups


def test_one_completion_a_prompt_is_fine_without_a_group_advantage(small: Path) -> None:
    assert load_recipe(small, ["--group_size=1", "--advantage.type=none"]).group_size == 1


def test_a_missing_file_and_broken_toml_are_the_user_s_to_mend(tmp_path: Path) -> None:
    assert "cannot be read (No such file or directory)" in refusal(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("steps = = 3")
    assert "is not valid TOML" in refusal(broken)


def test_changed_keys_are_named_in_full(small: Path) -> None:
    before, after = load_recipe(small), load_recipe(small, ["--learner.lr=1.0", "--eval.count=3"])
    assert changed_keys(before, after) == ["learner.lr", "eval"]
    assert changed_keys(before, before) == []


def test_every_key_is_described() -> None:
    undescribed = [name for name, field in Recipe.model_fields.items() if not field.description]
    assert undescribed == []


def test_sampling_again_is_refused_where_equal_groups_teach(small: Path) -> None:
    said = refusal(small, "--sampling.max_rounds=3", "--advantage.type=none")
    assert "sampling.max_rounds = 3 with advantage.type = 'none': groups of equal rewards teach too" in said
    assert "set it to 1" in said


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--engine.transport=gloo", "learner.lora with engine.transport = 'gloo': vLLM reads adapters from a folder"),
        ("--engine.transport=nccl", "set engine.transport to 'memory', or to 'disk' with an engine.folder"),
        ("--learner.lora.rank=513", "learner.lora.rank = 513 with engine.type = 'vllm'.*at most rank 512; lower it"),
    ],
)
def test_adapters_that_vllm_cannot_serve_are_refused(small: Path, override: str, message: str) -> None:
    adapters = ["--engine.type=vllm", "--learner.lora={rank=512}"]
    assert load_recipe(small, [*adapters, "--engine.transport=disk", "--engine.folder=x"]).learner.lora is not None
    with pytest.raises(ConfigurationError, match=message):
        load_recipe(small, [*adapters, override])
    assert load_recipe(small, ["--engine.type=vllm", "--engine.transport=gloo"]).learner.lora is None


def test_update_aware_codes_of_a_frozen_base_are_refused(small: Path) -> None:
    said = refusal(small, "--learner.lora={rank=4}", "--quant.update_aware=1.5")
    assert "quant.update_aware = 1.5 with learner.lora: " in said and "remove one of the two" in said
    assert load_recipe(small, ["--learner.lora={rank=4}"]).quant.update_aware == 1.0
    assert "quant.update_aware" in refusal(small, "--quant.update_aware=0.5")
    assert "learner.lr_scales" in refusal(small, '--learner.lr_scales."*"=0.0')


def test_another_engine_starts_its_table_afresh_and_has_its_own_keys(small: Path) -> None:
    small.write_text(SMALL + '[engine]\ntype = "native"\nkv_cache = "int8"\n')
    recipe = load_recipe(small, ["--engine.type=vllm", "--engine.urls=['http://a:1', 'http://b:1']"])
    assert recipe.engine == VllmEngineConfig(urls=("http://a:1", "http://b:1"))
    assert parse_recipe(tomllib.loads(to_toml(recipe)), "resolved") == recipe


def test_an_engines_table_without_a_type_is_the_native_ones(small: Path) -> None:
    small.write_text(SMALL + '[engine]\nkv_cache = "int8"\n')
    assert load_recipe(small).engine == NativeEngineConfig(kv_cache="int8")
    assert load_recipe(small, ["--engine.type=native", "--engine.max_concurrency=3"]).engine == NativeEngineConfig(
        kv_cache="int8", max_concurrency=3
    )
    small.write_text(SMALL + '[engine]\nurls = ["http://a:1"]\n')
    assert "engine.urls = ['http://a:1']: unknown key" in refusal(small)


def test_a_table_stands_for_the_overrides_that_it_nests(small: Path) -> None:
    table = tomllib.loads('rewards.0.weight = 2.0\n[objective]\nclip.x = 1\ntype = "grpo"\n[quant]\nrules = {}\n')
    assert overrides_of(table, "table [a]") == [
        Override(("rewards", "0", "weight"), 2.0, "table [a]"),
        Override(("objective", "type"), "grpo", "table [a]"),
        Override(("objective", "clip", "x"), 1, "table [a]"),
        Override(("quant", "rules"), {}, "table [a]"),
    ]


def test_a_mistake_is_told_with_where_its_override_comes_from(small: Path) -> None:
    table = tomllib.loads(small.read_text())
    overrides = [*overrides_of({"steps": 0}, "table [a]"), *overrides_of({"group_size": 1}, "table [b]")]
    with pytest.raises(ConfigurationError, match=r"^table \[a\]: steps = 0: must be"):
        parse_recipe(table, "small.toml", overrides)
    with pytest.raises(ConfigurationError, match=r"^small\.toml with the table \[b\]: group_size = 1 with"):
        parse_recipe(table, "small.toml", overrides[1:])
    with pytest.raises(ConfigurationError, match=r"^table \[c\]: steps\.x: steps is a value"):
        parse_recipe(table | {"steps": 1}, "small.toml", overrides_of({"steps": {"x": 1}}, "table [c]"))
