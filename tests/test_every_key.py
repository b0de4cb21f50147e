"""Every key of a recipe does something: another value changes what a run asks, samples, scores, learns or leaves.

A run is looked at in its parts, for a whole one would take a second for each of some three hundred keys: the prompts
that a source gives, the rewards of a few texts, the gradient of an objective, the weights after two updates, and, for
what only a whole run has, the files it leaves. A value that is refused does something too. What none of these can
show is listed with the reason, and with the test that shows it.
"""

from __future__ import annotations

import io
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from pydantic.fields import FieldInfo

from qarl.build import build, local_learner, scheme_plan
from qarl.config import Config
from qarl.errors import ConfigurationError, RunError
from qarl.explain import is_choice, members, tag_of
from qarl.metrics import values
from qarl.models.names import TINY_CONFIG, LoadedModel, random_weights
from qarl.models.save import save_folder
from qarl.models.tokenizer import byte_tokenizer
from qarl.recipe import Recipe, parse_overrides, parse_recipe
from qarl.records import Completion, Group, LossInputs, Prompt, Sampling
from qarl.rewards import Scorer
from qarl.rollout.config import VllmEngineConfig
from qarl.rollout.native import NativeEngine
from qarl.rollout.vllm.launch import command_line
from qarl.run import open_run, train
from qarl.sync.transport import FolderTransport, transport
from qarl.tracking.console import Console
from qarl.tracking.jsonl import read_lines

ROOT = Path(__file__).resolve().parents[1]

BASE: dict[str, Any] = {
    "model": "tiny",
    "steps": 2,
    "prompts_per_step": 2,
    "group_size": 4,
    "prompts": {"type": "arithmetic"},
    "rewards": [{"type": "answer"}, {"type": "repetition", "ngram": 1, "name": "again"}],
    "sampling": {"max_new_tokens": 8},
    "learner": {"lr": 0.03, "optimizer": {"type": "adamw"}},
}

Look = Callable[[Recipe], str]
"""What can be seen of a recipe, as a text; its own keys are not to be found in it."""


@dataclass(frozen=True)
class Trial:
    """Other values of a key, as on the command line, each against the default; `given` is set in both, and `look`,
    where there is one, stands in for the look that the key's table gets otherwise.
    """

    values: tuple[str, ...]
    given: tuple[str, ...] = ()
    look: str = ""


def trial(*values: str, given: str = "", look: str = "") -> tuple[Trial, ...]:
    """One trial; `given` is a line of options."""
    return (Trial(values, tuple(given.split()), look),)


TRIALS: dict[str, tuple[Trial, ...]] = {
    "model": trial("other"),
    "seed": trial("5"),
    "steps": trial("1"),
    "prompts_per_step": trial("3"),
    "group_size": trial("3"),
    "scheme": trial("none", "w4a8-int8", "w4a16", "fp8"),
    "prompts.type": trial("file", "datasets"),
    "rewards.type": trial("format", "length", "repetition"),
    "prompts.*.system": trial("hello"),
    "prompts.*.chat": trial("false"),  # the tokenizer here has a template, so that auto is true
    "prompts.*.template_args": trial("{x = 1}"),
    "prompts.*.max_prompt_tokens": trial("3"),
    "prompts.arithmetic.on_long": trial("skip", given="--prompts.maximum=99 --prompts.max_prompt_tokens=72"),
    "prompts.*.on_long": trial("skip", given="--prompts.max_prompt_tokens=28"),
    "prompts.arithmetic.minimum": trial("5"),
    "prompts.arithmetic.maximum": trial("5"),
    "prompts.arithmetic.operands": trial("3"),
    "prompts.arithmetic.operations": trial('["*"]'),
    "prompts.arithmetic.template": trial("{expression}"),
    "prompts.*.path": trial("other.jsonl"),
    "prompts.file.eval_path": trial("other.jsonl"),
    "prompts.file.eval_fraction": trial("0.5"),
    "prompts.datasets.subset": trial("more"),
    "prompts.datasets.split": trial("test"),
    "prompts.datasets.eval_split": trial("test"),
    "prompts.*.prompt_column": trial("hint"),
    "prompts.*.answer_column": trial("hint"),
    "rewards.*.weight": trial("2"),
    "rewards.*.name": trial("other"),
    "rewards.answer.pattern": trial("'is (\\d+)'", given="--rewards.0.extract=regex"),
    "rewards.answer.tolerance": trial("0.1"),
    "rewards.format.pattern": trial("'4.'"),
    "rewards.format.tags": trial('["think"]'),
    "rewards.length.max_tokens": trial("6", given="--rewards.0.buffer_tokens=1"),
    "rewards.length.buffer_tokens": trial("4", given="--rewards.0.max_tokens=6"),
    "rewards.length.token_cost": trial("0.5"),
    "rewards.repetition.ngram": trial("1"),
    "objective.*.kl.coef": trial("0.5"),
    "objective.*.entropy_coef": trial("0.5"),
    "objective.*.correction.*.cap": trial("0.9"),
    "objective.*.correction.icepop.low": trial("0.99"),
    "objective.*.correction.icepop.high": trial("1.01"),
    "objective.*.correction.mis.low": trial("0.5"),
    "objective.*.correction.mis.high": trial("2.0"),
    "objective.*.correction.ais.divergence_scale": trial("9.0"),
    "objective.gspo.clip_ratio_low": trial("0.5"),
    "objective.gspo.clip_ratio_high": trial("0.5"),
    "objective.*.clip_ratio_low": trial("0.01"),
    "objective.*.clip_ratio_high": trial("0.01"),
    "objective.dual_clip.clip_ratio_c": trial("1.0001"),
    "objective.tbpo.*seq_clip_ratio_*": trial("0.5"),
    "objective.tbpo.cap": trial("0.9"),
    "objective.acr.cap": trial("0.9"),
    "objective.tbpo.mismatch_low": trial("0.99"),
    "objective.tbpo.mismatch_high": trial("1.01"),
    "objective.tbpo.salvage_probability": trial("0.9"),
    "objective.tbpo.salvage_ngram": trial("1", given="--objective.salvage_probability=0.9"),
    "objective.tbpo.salvage_window": trial("0", given="--objective.salvage_probability=0.9"),
    "sampling.temperature": trial("0.5"),
    "sampling.max_new_tokens": trial("5"),
    "sampling.max_rounds": trial("2", given="--rewards.1.weight=0", look="left"),
    "engine.type": trial("vllm"),
    "engine.native.kv_bytes": trial("65536"),
    "engine.vllm.dtype": trial("float16", "float32"),
    "engine.vllm.kv_bytes": trial("1048576"),
    "engine.vllm.max_concurrency": trial("7"),
    "engine.vllm.tensor_parallel": trial("2"),
    "engine.vllm.compiled": trial("true"),
    "engine.vllm.transport": trial("gloo", "nccl") + trial("disk", given="--engine.folder=versions"),
    "engine.vllm.folder": trial("other", given="--engine.transport=disk --engine.folder=versions"),
    "engine.vllm.options": trial("{swap_space = 1}"),
    "learner.lr": trial("0.01"),
    "learner.lr_scales": trial('{"*.down_proj.weight" = 0.5}'),
    "learner.updates_per_batch": trial("2"),
    "learner.micro_batch_tokens": trial("64"),
    "learner.head_chunk_tokens": trial("3"),
    "learner.skip_equal_groups": trial("false") + trial("true", given="--objective.entropy_coef=0.1"),
    "learner.max_grad_norm": trial("1e-6"),
    "learner.lora.rank": trial("2"),
    "learner.lora.alpha": trial("8"),
    "learner.lora.targets": trial('["*.q_proj"]'),
    "learner.optimizer.*betas": trial("[0.5, 0.6]"),
    "learner.optimizer.*eps": trial("0.1"),
    "learner.optimizer.*weight_decay": trial("0.9"),
    "learner.optimizer.muon.momentum": trial("0.1"),
    "learner.optimizer.muon.newton_schulz_steps": trial("2"),
    "learner.optimizer.muon.adamw_lr_ratio": trial("0.1"),
    "learner.schedule.*.warmup_steps": trial("2"),
    "learner.schedule.*.final_fraction": trial("0.5"),
    "quant.rules": trial('{"*.down_proj" = "none"}'),
    "quant.update_aware": trial("1.5"),
    "eval.name": trial("other"),
    "eval.count": trial("5"),
    "eval.samples": trial("2"),
    "eval.temperature": trial("0.1"),
    "eval.every": trial("1"),
    "checkpoint.every": trial("1"),
    "checkpoint.keep_last": trial("1", given="--checkpoint.every=1"),
    "checkpoint.keep_best": trial("true", given="--checkpoint.every=1 --eval.count=2 --eval.every=1"),
    "health.entropy.limit": trial("-1e6"),
    "health.no_gradient.limit": trial("-1e6"),
    "health.*.limit": trial("1e6"),
    "health.*.steps": trial("9"),
    "health.*.action": trial("off", "warn"),
}  # fmt: skip
"""A key may match several patterns; the first counts. Types, and keys with a few known values, get all of those."""

NEEDS = {
    "prompts.file": "path=rows.jsonl",
    "prompts.datasets": "path=rows.jsonl",
    "rewards.format": "tags=['answer']",
    "rewards.length": "token_cost=0.1",
    "rewards.repetition": "ngram=2",
    "learner.lora": "rank=4",
    "objective.*.kl": "coef=0.1",
    "eval": "count=4",
    "health.entropy": "limit=1e3 steps=1 action=stop",
    "health.no_gradient": "limit=1e3 steps=1 action=stop",
    "health.*": "limit=-1e3 steps=1 action=stop",
}
"""What a table must have, or with which its keys show; the first that matches counts."""

SLOW = "other people's code, which takes seconds to load or runs in processes of its own"

UNSEEN: dict[str, tuple[str, str]] = {
    "device": (
        "needs a GPU",
        "tests/test_build.py::test_the_device_is_the_recipes_and_the_account_says_why",
    ),
    "max_reward_error_share": (
        "needs rewards that fail",
        "tests/test_readings.py::test_too_many_failures_end_the_run",
    ),
    "prompts.reasoning_gym.*": (
        SLOW,
        "tests/prompts/test_gym.py::test_unknown_task_or_setting_is_refused",
    ),
    **{
        f"rewards.code.{key}": (SLOW, f"tests/rewards/{test}")
        for key, test in {
            "tests_column": "test_code.py::test_columns_of_mbpp_and_humaneval",
            "function_column": "test_code.py::test_columns_of_mbpp_and_humaneval",
            "setup_column": "test_code.py::test_columns_of_mbpp_and_humaneval",
            "preamble": "test_code.py::test_a_preamble_comes_before_the_program",
            "extract": "test_code.py::test_the_whole_completion",
            "partial": "test_code.py::test_the_share_of_tests",
            "tolerance": "test_trials.py::test_values_within_a_tolerance",
            "timeout": "test_sandbox.py::test_a_program_past_its_time_is_killed_and_gone",
            "total_timeout": "test_code.py::test_tests_past_the_total_time_have_failed",
            "memory_mb": "test_sandbox.py::test_memory_is_bounded",
            "max_output_bytes": "test_sandbox.py::test_output_is_bounded",
            "scratch_mb": "test_sandbox.py::test_a_folder_of_its_own_is_writable_bounded_and_gone",
            "packages": "test_sandbox.py::test_packages_can_be_imported_where_they_are_named",
        }.items()
    },
    "rewards.*.timeout": (SLOW, "tests/rewards/test_keeper.py::test_what_may_happen_to_one_call_happens_to_no_other"),
    "rewards.*.memory_mb": (SLOW, "tests/rewards/test_keeper.py::test_as_much_memory_as_is_allowed_may_be_taken"),
    **{
        f"rewards.{foreign}.{key}": (f"as of every term, and this one is {SLOW}", test)
        for foreign in ("math_verify", "reasoning_gym", "python", "code")
        for key, test in (
            ("weight", "tests/rewards/test_scorer.py::test_total_is_the_weighted_sum_and_terms_are_raw"),
            ("name", "tests/rewards/test_term.py::test_label_is_the_name_or_else_the_type"),
        )
    },
    "rewards.math_verify.max_characters": (
        SLOW,
        "tests/rewards/test_math_verify.py::test_only_the_end_of_a_long_completion_is_read",
    ),
    "rewards.reasoning_gym.tag": (
        SLOW,
        "tests/rewards/test_gym.py::test_the_tasks_verifier_scores_what_stands_in_the_last_tag",
    ),
    "rewards.python.function": (
        SLOW,
        "tests/rewards/test_function.py::test_function_that_is_not_there_is_refused",
    ),
    "rewards.python.style": (
        SLOW,
        "tests/rewards/test_function.py::test_verl_function_gets_its_four_arguments",
    ),
    "objective.tbpo.seq_clip_ratio_low": (
        "the formula's minimum never selects it, as its description says",
        "tests/objectives/test_tbpo.py::test_truth_table_of_values_and_gradients",
    ),
    "engine.native.max_concurrency": (
        "how the engine is run changes no bit of what it returns",
        "tests/rollout/test_native.py::test_how_the_engine_is_run_does_not_change_a_completion",
    ),
    "engine.native.prefill_tokens": (
        "how the engine is run changes no bit of what it returns",
        "tests/rollout/test_native.py::test_how_the_engine_is_run_does_not_change_a_completion",
    ),
    "engine.vllm.urls": (
        "needs a server",
        "tests/rollout/vllm/test_engine.py::test_a_url_is_where_vllm_is_and_how_long_it_may_be_silent",
    ),
    "engine.vllm.head_dtype": (
        "is said to vLLM by the model's folder",
        "tests/rollout/vllm/test_launch.py::test_the_type_of_logits_is_that_of_the_recipe",
    ),
    "engine.vllm.timeout_s": (
        "needs a server that is silent",
        "tests/rollout/vllm/test_engine.py::test_a_url_is_where_vllm_is_and_how_long_it_may_be_silent",
    ),
    "engine.vllm.start_timeout_s": (
        "needs a vLLM that does not start",
        "tests/rollout/vllm/test_offline.py::test_a_start_that_takes_too_long_is_ended",
    ),
    "health.*.relative": (
        "needs readings that rise",
        "tests/test_health.py::test_a_relative_limit_is_counted_from_the_first_reading",
    ),
    "learner.activation_checkpointing": (
        "saves memory and changes no bit",
        "tests/learner/test_learner.py::test_what_saves_memory_computes_the_same",
    ),
    "learner.max_skipped_updates": (
        "needs gradients that are not finite",
        "tests/learner/test_learner.py::test_the_run_stops_after_too_many_skipped_updates_in_a_row",
    ),
    **{
        f"cluster.{key}": ("needs Ray and processes of its own", f"tests/cluster/test_ray.py::{test}")
        for key, test in {
            "engines": "test_a_run_on_actors_is_the_run_in_one_process",
            "ray_address": "test_engines_live_on_the_machines_of_a_running_cluster_and_outlive_one_of_them",
            "engine_cpus": "test_an_engine_has_the_threads_that_the_recipe_says",
            "engine_gpus": "test_more_than_there_is_is_refused_before_anything_starts",
            "restarts": "test_a_killed_engine_is_replaced_and_its_prompts_are_asked_again",
            "timeout_s": "test_a_hung_engine_ends_the_run_in_time",
        }.items()
    },
    "eval.correct_term": (
        "a random model is right by no term",
        "tests/test_evaluate.py::test_the_named_term_says_what_is_right",
    ),
}
"""Keys that cannot be seen in this way: why, and which test shows what they do."""


@dataclass(frozen=True)
class Leaf:
    """A key with the types that it is under, such as `objective.grpo.kl.coef`; `options` choose those types."""

    name: str
    key: str
    options: tuple[str, ...]
    field: FieldInfo
    choices: tuple[str, ...]


def leaves(owner: type[Config], name: str = "", key: str = "", options: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """All keys below a class, once under every type of every choice on the way."""
    for own, field in owner.model_fields.items():
        inner = members(field.annotation)
        below = f"{key}{own}.0" if get_origin(field.annotation) is tuple and inner else f"{key}{own}"
        if not inner:
            yield Leaf(f"{name}{own}", below, options, field, _choices(field))
            continue
        tagged = is_choice(field.annotation) or len(inner) > 1
        if tagged:
            tags = tuple(str(tag_of(one)) for one in inner)
            yield Leaf(f"{name}{own}.type", f"{below}.type", (*options, *_needs(f"{name}{own}", below)), field, tags)
        for one in inner:
            there = f"{name}{own}.{tag_of(one)}" if tagged else f"{name}{own}"
            chosen = (f"--{below}.type={tag_of(one)}",) if tagged else ()
            for leaf in leaves(one, f"{there}.", f"{below}.", (*options, *chosen, *_needs(there, below))):
                if not (tagged and leaf.name == f"{there}.type"):
                    yield leaf


def _needs(name: str, key: str) -> tuple[str, ...]:
    found = [needed for pattern, needed in NEEDS.items() if fnmatchcase(name, pattern)]
    return tuple(f"--{key}.{part}" for part in found[0].split()) if found else ()


def _choices(field: FieldInfo) -> tuple[str, ...]:
    """All values of a key that has a few known ones."""
    kind = field.annotation
    parts = get_args(kind) if get_origin(kind) not in (None, Literal, tuple, dict) else (kind,)
    found = [str(value) for part in parts if get_origin(part) is Literal for value in get_args(part)]
    return (*found, *(["true", "false"] if bool in parts else []))


LEAVES = {leaf.name: leaf for leaf in leaves(Recipe)}


REFUSED = "refused"


def matching(table: Mapping[str, Any], name: str) -> str | None:
    return next((pattern for pattern in table if fnmatchcase(name, pattern)), None)


def trials_of(leaf: Leaf) -> tuple[Trial, ...]:
    """Those of the table; else every known value."""
    pattern = matching(TRIALS, leaf.name)
    return TRIALS[pattern] if pattern is not None else (Trial(leaf.choices),)


def look_of(name: str, wanted: str) -> Look:
    table = name.split(".")[0]
    by_table = {"prompts": "asked", "rewards": "scored", "objective": "judged", "advantage": "learned"}
    by_table |= dict.fromkeys(("learner", "quant", "scheme", "alignment", "sampling", "engine"), "learned")
    if name.startswith(("engine.type", "engine.vllm.")):
        return LOOKS["served"]
    return LOOKS[wanted or by_table.get(table, "left")]


class Bench:
    """Sees, and remembers what was seen already."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Look, tuple[str, ...]], str] = {}

    def see(self, look: Look, options: tuple[str, ...]) -> str:
        """What there is to see of the base recipe with these options, which may be that it is refused."""
        if (look, options) not in self._seen:
            try:
                self._seen[look, options] = look(parse_recipe(BASE, "recipe", parse_overrides(options)))
            except (ConfigurationError, RunError):
                self._seen[look, options] = REFUSED
        return self._seen[look, options]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("keys")
    rows = [{"prompt": f"{n} + 1?", "answer": str(n + 1), "hint": f"{n + 1}!"} for n in range(4)]
    rows[3]["prompt"] += " A long one."
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "other.jsonl").write_text("".join(json.dumps({**row, "prompt": "?"}) + "\n" for row in rows))
    save_folder(folder / "other", TINY_CONFIG, random_weights(TINY_CONFIG, seed=1), byte_tokenizer())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(sys.modules, "datasets", stand_in_for_datasets(rows))
        for name, module in stand_in_for_vllm().items():
            patch.setitem(sys.modules, name, module)
        # Nobody looks at the picture or pulls the plug.
        patch.setattr("qarl.run.draw", lambda folder: folder)
        patch.setattr("os.fsync", lambda descriptor: None)
        yield Bench()


def stand_in_for_datasets(rows: list[dict[str, str]]) -> ModuleType:
    """The library, with one data set of two splits and two subsets."""

    def load_dataset(path: str, subset: str | None, split: str) -> list[dict[str, str]]:
        return [{**row, "from": f"{path} {subset} {split}"} for row in rows]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    return module


def stand_in_for_vllm() -> dict[str, ModuleType]:
    """The part of it that says which arguments its engine has."""

    @dataclass
    class EngineArgs:
        swap_space: float = 4.0

    names = ("vllm", "vllm.engine", "vllm.engine.arg_utils")
    modules = {name: ModuleType(name) for name in names}
    modules[names[-1]].EngineArgs = EngineArgs
    return modules


@pytest.mark.parametrize("name", LEAVES)
def test_another_value_does_something(bench: Bench, name: str) -> None:
    leaf = LEAVES[name]
    if matching(UNSEEN, name) is not None or len(leaf.choices) == 1:
        return
    for one in trials_of(leaf):
        look = look_of(name, one.look)
        options = (*leaf.options, *one.given)
        usual = bench.see(look, options)
        others = {value: bench.see(look, (*options, *setting(leaf, value))) for value in one.values}
        assert others, f"{name}: name a value other than the default in TRIALS, or the test that shows it in UNSEEN"
        same = [value for value, other in others.items() if other == usual]
        # Of all known values one is the default.
        assert len(same) <= (one.values == leaf.choices), f"{name} = {same} do nothing; seen: {usual[:200]}"


def setting(leaf: Leaf, value: str) -> tuple[str, ...]:
    """The options for a value; a type comes with what its table needs."""
    choice = leaf.name.removesuffix(".type"), leaf.key.removesuffix(".type")
    needed = _needs(f"{choice[0]}.{value}", choice[1]) if leaf.name.endswith(".type") else ()
    return (f"--{leaf.key}={value}", *needed)


@pytest.mark.parametrize("look", ["asked", "scored", "judged", "learned", "left"])
def test_without_another_value_there_is_nothing_to_see(bench: Bench, look: str) -> None:
    recipe = parse_recipe(BASE, "recipe", parse_overrides(["--eval.count=4", "--eval.every=1"]))
    assert LOOKS[look](recipe) == LOOKS[look](recipe)


def test_no_table_names_a_key_that_is_gone() -> None:
    for table in (TRIALS, UNSEEN):
        stale = [pattern for pattern in table if not any(fnmatchcase(name, pattern) for name in LEAVES)]
        assert stale == []
    both = [name for name in LEAVES if name in TRIALS and name in UNSEEN]
    assert both == [], "seen or not"


def test_what_cannot_be_seen_here_is_shown_by_a_test_that_exists() -> None:
    for reason, place in UNSEEN.values():
        file, _, function = place.partition("::")
        assert reason and f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), place


def test_the_walk_reaches_keys_of_every_depth() -> None:
    assert {"seed", "prompts.type", "prompts.file.path", "rewards.answer.extract", "objective.dapo.correction.mis.low",
            "objective.tbpo.kl.coef", "learner.optimizer.muon.adamw.eps", "quant.rules"} <= set(LEAVES)  # fmt: skip
    assert LEAVES["objective.dapo.correction.mis.low"].options == (
        "--objective.type=dapo",
        "--objective.correction.type=mis",
    )
    assert set(LEAVES["learner.skip_equal_groups"].choices) == {"auto", "true", "false"}


def asked(recipe: Recipe) -> str:
    """Prompts for training and held out ones."""
    source = recipe.prompts.build(recipe.prompts.renderer(byte_tokenizer()), recipe.seed)
    prompts = [prompt for step in range(2) for prompt in source.take(step, 2)]
    try:
        prompts += source.held_out(2)
    except ConfigurationError:
        prompts += prompts[:1]  # there are none
    return json.dumps([[prompt.text, prompt.token_ids, dict(prompt.row)] for prompt in prompts])


TEXTS = [
    "The answer is \\boxed{42}.",
    "#### 42\nbut 7",
    "Answer: 42\nnot 3",
    "42",
    "40",
    "<think>a</think><answer>42</answer>",
    "<answer>42</answer>",
]


def scored(recipe: Recipe) -> str:
    """Rewards of answers to one question, the last of them cut off."""
    completions = []
    for index, text in enumerate(TEXTS):
        tokens = torch.tensor([5, 6, 5, 6, 7, 5, 6][: index + 1])
        end: Any = "stop" if index < len(TEXTS) - 1 else "length"
        completions.append(Completion(tokens, torch.zeros(len(tokens)), torch.zeros(len(tokens)), end, text))
    group = Group(Prompt("sums/1", (1,), "?", {"answer": "42"}), tuple(completions))
    (rewards,) = Scorer(recipe.rewards)([group])
    return str([rewards.total.tolist(), {name: terms.tolist() for name, terms in rewards.terms.items()}])


def judged(recipe: Recipe) -> str:
    """Loss, gradient and metrics of an objective, far from the policy that sampled and the one that was trained."""
    generator = torch.Generator().manual_seed(0)
    old, change, mismatch = (torch.randn(8, 10, generator=generator, dtype=torch.float64) for _ in range(3))
    old = -old.abs()
    new = (old + 0.1 * change).requires_grad_()
    entropy = torch.ones(8, 10, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(10) < torch.tensor([10, 10, 9, 8, 7, 5, 2, 1])[:, None]
    objective = recipe.objective
    report = objective(
        LossInputs(
            new_BT=new,
            old_BT=old,
            engine_BT=old + 0.05 * mismatch,
            advantages_B=torch.tensor([1.0, -1.0, 0.5, -2.0, 1.0, -0.5, 1.0, -1.0], dtype=torch.float64),
            mask_BT=mask,
            num_sequences=8,
            num_tokens=int(mask.sum()),
            max_new_tokens=10,
            entropy_BT=entropy if objective.needs_entropy else None,
            reference_BT=old - 0.3 if objective.needs_reference else None,
            tokens_BT=torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3, 4, 5]] * 8),
        )
    )
    report.loss.backward()
    return str([report.loss.item(), new.grad, entropy.grad, values(report.metrics)])


UNTIED = replace(TINY_CONFIG, tie_embeddings=False)
REWARDS = [torch.tensor([1.0, 0.0, 0.5, 0.2]), torch.tensor([1.0, 1.0, 1.0, 1.0])]


def learned(recipe: Recipe) -> str:
    """Samples, metrics and weights of two updates of a model with a head of its own; of two groups one is equal."""
    tokenizer = byte_tokenizer()
    model = LoadedModel("untied", UNTIED, random_weights(UNTIED, seed=0), tokenizer, 259, (258,))
    learner = local_learner(recipe, model, scheme_plan(model, recipe.scheme, recipe.quant))
    engine = NativeEngine(recipe.engine, UNTIED, 259, str)
    sampling = Sampling(recipe.sampling.temperature, recipe.sampling.max_new_tokens, (258,))
    prompts = [Prompt(f"p/{n}", tuple(range(n, n + 60)), "", {}) for n in (1, 2)]
    engine.check_fit(prompts, sampling)
    seen: list[Any] = []
    for step in range(2):
        engine.load(learner.publish())
        groups = [shortened(group) for group in engine.generate(prompts, 4, sampling, (recipe.seed, step))]
        completions = [one for group in groups for one in group.completions]
        seen += [(one.token_ids.tolist(), one.engine_logprobs.tolist()) for one in completions]
        seen.append(values(learner.update(groups, recipe.advantage(REWARDS))))
    weights = [float((weight.detach().double() * torch.arange(1, weight.numel() + 1).view(weight.shape)).sum())
               for weight in learner.trained().values()]  # fmt: skip
    return str([seen, weights])


def shortened(group: Group) -> Group:
    """Completions of unlike lengths, as random models do not write them."""
    return Group(
        group.prompt,
        tuple(
            Completion(one.token_ids[:-cut], one.engine_logprobs[:-cut], one.versions[:-cut], "length", one.text)
            for cut, one in enumerate(group.completions, 1)
        ),
    )


def served(recipe: Recipe) -> str:
    """What vLLM would be started with, and by what way versions would reach it."""
    engine = recipe.engine
    if not isinstance(engine, VllmEngineConfig):
        return "not by vLLM"
    way = transport(engine.transport, engine.folder, 1, engine.timeout_s)
    home = way._home.parent if isinstance(way, FolderTransport) else way._backend
    return str(
        [command_line(Path("model"), engine, 80, {"enable_lora": False}, "host", 8000), type(way).__name__, str(home)]
    )


def left(recipe: Recipe) -> str:
    """What a whole run leaves in its folder, but for what a clock makes and the recipe itself."""
    folder = Path(f"run-{next(RUNS)}")
    start = open_run(recipe, "keys", folder, "never")
    console = Console(io.StringIO(), 0, recipe.steps)
    summary = train(recipe, build(recipe), start, console)
    own = ("step", "reward", "completion", "mismatch", "objective", "optim", "quant", "eval", "perf/rollout_rounds")
    rows = [
        {key: value for key, value in row.items() if key.startswith(own)}
        for file in ("metrics.jsonl", "evaluations.jsonl")
        for row in read_lines(folder / file)
    ]
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    return str([rows, names, "best_checkpoint" in summary])


RUNS = itertools.count()
LOOKS: dict[str, Look] = {
    "asked": asked,
    "scored": scored,
    "judged": judged,
    "learned": learned,
    "served": served,
    "left": left,
}
