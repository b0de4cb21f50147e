"""What a run is: a TOML file and dotted overrides, checked as a whole into one tree of the rooms' configurations."""

from __future__ import annotations

import copy
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import tomli_w
from pydantic import Field, ValidationError, field_validator, model_validator

from qarl.advantages import AdvantageConfig, GroupStd
from qarl.cluster.config import ClusterConfig
from qarl.config import Config
from qarl.errors import ConfigurationError, printable
from qarl.explain import Place, did_you_mean, is_choice, locate, problems
from qarl.health import Health
from qarl.learner.config import LearnerConfig
from qarl.models.lora import LoraConfig
from qarl.objectives import ObjectiveConfig, Tbpo
from qarl.ops.device import DeviceChoice
from qarl.prompts import PromptsConfig
from qarl.quant import QuantConfig, scheme_named
from qarl.rewards import RewardConfig
from qarl.rollout.config import LORA_RANKS, EngineConfig, NativeEngineConfig, SamplingConfig, VllmEngineConfig


class EvalConfig(Config):
    """Held-out questions of the prompts' source, asked before the first step, after the last, and in between."""

    name: str = Field("held_out", pattern=r"^[\w.-]+$", description="The set's name in metrics: `eval/<name>/pass@1`.")
    count: int = Field(200, ge=1, description="How many questions.")
    samples: int = Field(1, ge=1, description="Answers a question; also the k of pass@k.")
    temperature: float = Field(1.0, ge=0.0, description="Divides the logits; 0 takes the likeliest token.")
    every: int = Field(0, ge=0, description="Steps between evaluations; 0: only before and after the run.")
    correct_term: str | None = Field(
        None, description="Reward term that says whether an answer is right (at least 1); without it, the first term."
    )

    @model_validator(mode="after")
    def _greedy_answers_are_all_the_same(self) -> Self:
        if self.temperature == 0.0 and self.samples > 1:
            raise ValueError(
                f"samples = {self.samples} with temperature = 0: greedy answers are all the same; set samples = 1 or a "
                "temperature above 0"
            )
        return self


class CheckpointConfig(Config):
    """When the whole state of a run is saved."""

    every: int = Field(10, ge=1, description="Steps between checkpoints; there is always one at the end.")
    keep_last: int = Field(2, ge=1, description="How many of the newest checkpoints are kept.")
    keep_best: bool = Field(
        False, description="Also keep the one with the highest held-out pass@1, of those that `eval.every` measured."
    )


class Recipe(Config):
    """One training run."""

    model: str = Field(min_length=1, description="A folder, a run, a hub id, or a name qarl knows.")
    seed: int = Field(0, ge=0, description="Everything random in a run follows from it.")
    steps: int = Field(100, ge=1, description="Rollout batches to train on.")
    prompts_per_step: int = Field(8, ge=1, description="Questions of a rollout batch.")
    group_size: int = Field(8, ge=1, description="Completions of every question.")
    device: DeviceChoice = Field(
        "auto",
        description="Where the learner and our own engine compute; `auto`: on a GPU where torch sees one and Triton is "
        "installed, else on the CPU.",
    )
    scheme: str = Field("w8a8-int8", description="How weights and activations are quantized; `none`: they are not.")
    alignment: Literal["auto", "none"] = Field(
        "auto", description="`auto`: the learner computes as the engine does; `none`: in full precision, a baseline."
    )
    prompts: PromptsConfig = Field(description="Where questions come from.")
    rewards: tuple[RewardConfig, ...] = Field(
        strict=False, min_length=1, description="Terms of the reward; it is their weighted sum."
    )
    max_reward_error_share: float = Field(
        0.1, ge=0.0, le=1.0, description="The run stops when more completions of a batch than this have no reward."
    )
    advantage: AdvantageConfig = Field(default_factory=GroupStd, description="From rewards to advantages.")
    objective: ObjectiveConfig = Field(default_factory=Tbpo, description="What the learner maximizes.")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="How completions are drawn.")
    engine: EngineConfig = Field(default_factory=NativeEngineConfig, description="What makes completions.")
    learner: LearnerConfig = Field(default_factory=LearnerConfig, description="What changes weights.")
    quant: QuantConfig = Field(default_factory=QuantConfig, description="Exceptions and additions to the scheme.")
    eval: EvalConfig | None = Field(None, description="Held-out questions; without this table there are none.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="When state is saved.")
    health: Health = Field(default_factory=Health, description="What a run warns of and what it stops for.")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="What lives in other processes.")

    @property
    def longest_sequence(self) -> int:
        """The most tokens that a prompt and its completion may have together."""
        return self.prompts.max_prompt_tokens + self.sampling.max_new_tokens

    @field_validator("scheme")
    @classmethod
    def _scheme_exists(cls, scheme: str) -> str:
        scheme_named(scheme)
        return scheme

    @field_validator("engine", mode="before")
    @classmethod
    def _native_unless_said(cls, engine: Any) -> Any:
        """Its table needs no `type`: recipes were written when there was one engine."""
        return {"type": "native", **engine} if isinstance(engine, dict) else engine

    @model_validator(mode="after")
    def _choices_fit_together(self) -> Self:
        complaints = [
            *_group_complaints(self),
            *_update_complaints(self),
            *_quant_complaints(self),
            *_eval_complaints(self),
            *_engine_complaints(self),
        ]
        if complaints:
            raise ValueError("; ".join(complaints))
        return self


@dataclass(frozen=True, slots=True)
class Override:
    """`--learner.lr=1e-5`: the keys on the way, and a TOML value (a bare word is a string); `origin` in errors."""

    path: tuple[str, ...]
    value: Any
    origin: str = "command line"

    @property
    def key(self) -> str:
        return ".".join(self.path)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply command-line overrides; ConfigurationError has one line for every problem found."""
    return parse_recipe(read_toml(path, "a recipe"), str(path), parse_overrides(overrides))


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The table in a file; ConfigurationError where there is none, which says that `what` is wanted."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror}); give the path of {what}") from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, digits or brackets without end
        raise ConfigurationError(f"{path}: is not valid TOML: {error}") from error


def parse_recipe(table: dict[str, Any], source: str, overrides: Sequence[Override] = ()) -> Recipe:
    """A recipe from a parsed table; `source` is its name in errors."""

    def source_of(key: str) -> str:
        for one in reversed(overrides):
            if key == one.key or key.startswith(f"{one.key}."):
                return one.origin
        partly = dict.fromkeys(one.origin for one in overrides if key == "" or one.key.startswith(f"{key}."))
        return " with ".join([source, *(f"the {origin}" for origin in partly)])

    try:
        return Recipe.model_validate(apply_overrides(table, overrides))
    except ValidationError as error:
        raise ConfigurationError("\n".join(problems(error, Recipe, source_of))) from None
    except RecursionError:
        raise ConfigurationError(
            f"{source_of('')}: tables lie too deep in one another; no key of a recipe does"
        ) from None


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """`--a.b=value` or `--a.b value`; a key with dots or other signs is quoted: `--quant.rules."*.o_proj"=none`."""
    overrides = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        key, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not key:
            raise ConfigurationError(f"{printable(argument)}: is no option; override a recipe's key as --key.sub=value")
        shown = printable(key)
        parts = re.findall(r'"[^"]*"|[^."]+', key)
        if ".".join(parts) != key:
            raise ConfigurationError(f"--{shown}: is no key; parts are joined by single dots, and quoted in pairs")
        if not equals:
            if not waiting or waiting[0].startswith("--"):
                raise ConfigurationError(
                    f"--{shown}: has no value; write --{shown}=value (`--help` lists the options that take none)"
                )
            text = waiting.pop(0)
        overrides.append(Override(tuple(part.strip('"') for part in parts), _toml_value(text)))
    return overrides


def overrides_of(table: Mapping[str, Any], origin: str, above: tuple[str, ...] = ()) -> list[Override]:
    """The overrides that a table nested as in a recipe stands for; an empty table in it empties the recipe's."""
    found = []
    # What a `type` starts afresh are the keys that stand beside it, those of their own tables included.
    for name, value in sorted(table.items(), key=lambda pair: pair[0] != "type"):
        if isinstance(value, dict) and value:
            found += overrides_of(value, origin, (*above, name))
        else:
            found.append(Override((*above, name), value, origin))
    return found


def apply_overrides(table: dict[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """A changed copy. Another `type` starts its table afresh: the old type's settings mean nothing to the new one."""
    changed = copy.deepcopy(table)
    for override in sorted(overrides, key=lambda one: one.path[-1] != "type"):
        owner = _owner(changed, override)
        name = override.path[-1]
        if isinstance(owner, list):
            owner[_index(owner, name, override)] = override.value
            continue
        if (
            name == "type"
            and owner.get("type", override.value) != override.value
            and is_choice(_place(override.path[:-1]).kind)
        ):
            owner.clear()
        owner[name] = override.value
    return changed


def to_toml(recipe: Recipe) -> str:
    """Every key with its value, defaults included; reading it back gives the same recipe."""
    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))


def changed_keys(before: Recipe, after: Recipe) -> list[str]:
    """Dotted keys whose values differ, in the order of the recipe."""
    return list(_differences(before.model_dump(mode="json"), after.model_dump(mode="json"), ""))


def _differences(before: Any, after: Any, key: str) -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        names = list(dict.fromkeys([*before, *after]))
        inner = [_differences(before.get(name), after.get(name), f"{key}.{name}") for name in names]
        found = [one for part in inner for one in part]
        # Tables of a class are always in its order; of a user's own, such as `quant.rules`, the order may decide.
        return found or ([] if list(before) == list(after) else [f"the order of {key.removeprefix('.')}"])
    return [] if before == after else [key.removeprefix(".")]


def _group_complaints(recipe: Recipe) -> list[str]:
    if recipe.sampling.max_rounds > 1 and not recipe.advantage.needs_group:
        return [
            f"sampling.max_rounds = {recipe.sampling.max_rounds} with advantage.type = '{recipe.advantage.type}': "
            "groups of equal rewards teach too, so that there is nothing to sample again for; set it to 1"
        ]
    if recipe.group_size > 1 or not recipe.advantage.needs_group:
        return []
    return [
        f"group_size = 1 with advantage.type = '{recipe.advantage.type}': a single completion has nothing to be "
        "compared with; set group_size to 2 or more, or advantage.type = 'none'"
    ]


def _engine_complaints(recipe: Recipe) -> list[str]:
    if isinstance(recipe.engine, VllmEngineConfig) and recipe.engine.urls and recipe.cluster.engines:
        return [
            f"engine.urls names servers and cluster.engines = {recipe.cluster.engines} starts engines: leave one of "
            "the two out"
        ]
    if isinstance(recipe.engine, VllmEngineConfig) and recipe.learner.lora is not None:
        return _adapters_complaints(recipe.learner.lora, recipe.engine)
    return []


def _quant_complaints(recipe: Recipe) -> list[str]:
    if recipe.quant.update_aware == 1.0 or recipe.learner.lora is None:
        return []
    return [
        f"quant.update_aware = {recipe.quant.update_aware:g} with learner.lora: it lets updates move more codes, and "
        "those of a frozen base never move; remove one of the two"
    ]


def _adapters_complaints(lora: LoraConfig, engine: VllmEngineConfig) -> list[str]:
    """Of adapters that vLLM serves."""
    complaints = []
    if engine.transport in ("gloo", "nccl"):
        complaints.append(
            f"learner.lora with engine.transport = '{engine.transport}': vLLM reads adapters from a folder; set "
            "engine.transport to 'memory', or to 'disk' with an engine.folder that all of its workers see"
        )
    if lora.rank > LORA_RANKS[-1]:
        complaints.append(
            f"learner.lora.rank = {lora.rank} with engine.type = 'vllm', which serves adapters of at most rank "
            f"{LORA_RANKS[-1]}; lower it"
        )
    return complaints


def _update_complaints(recipe: Recipe) -> list[str]:
    complaints = []
    updates = recipe.learner.updates_per_batch
    if recipe.prompts_per_step % updates:
        complaints.append(
            f"learner.updates_per_batch = {updates} does not divide prompts_per_step = {recipe.prompts_per_step}: "
            "every update takes the same number of prompts; change one of the two"
        )
    if updates > 1 and not recipe.objective.allows_several_updates:
        complaints.append(
            f"learner.updates_per_batch = {updates} with objective.type = '{recipe.objective.type}': it has no ratio "
            "that follows the policy from one update to the next; set learner.updates_per_batch = 1, or "
            "objective.type = 'grpo'"
        )
    if recipe.learner.skip_equal_groups is True and (
        recipe.objective.needs_entropy or recipe.objective.needs_reference
    ):
        complaints.append(
            "learner.skip_equal_groups = true with a KL or entropy term: groups of equal rewards have a gradient then; "
            "set it to false, or leave out objective.kl and objective.entropy_coef"
        )
    try:
        recipe.learner.schedule(0, recipe.steps)
    except ConfigurationError as error:
        complaints.append(str(error))
    return complaints


def _eval_complaints(recipe: Recipe) -> list[str]:
    complaints = []
    wanted = recipe.eval.correct_term if recipe.eval is not None else None
    labels = [term.label for term in recipe.rewards]
    if wanted is not None and wanted not in labels:
        complaints.append(f"eval.correct_term = '{wanted}' is no reward term; {did_you_mean(wanted, labels)}")
    held_out_key = recipe.prompts.held_out_key
    if recipe.eval is None and held_out_key is not None:
        complaints.append(
            f"prompts.{held_out_key} holds questions out that nothing asks: add an [eval] table, or remove the key"
        )
    if recipe.checkpoint.keep_best:
        complaints += _best_complaints(recipe.checkpoint.every, 0 if recipe.eval is None else recipe.eval.every)
    return complaints


def _best_complaints(saved_every: int, asked_every: int) -> list[str]:
    """What keeps checkpoints from being rated, given the steps between them and between evaluations."""
    if asked_every == 0:
        return [
            "checkpoint.keep_best = true without evaluations during the run: nothing says which is best; set "
            f"eval.every, for example to checkpoint.every = {saved_every}"
        ]
    if asked_every % saved_every and saved_every % asked_every:
        return [
            f"checkpoint.keep_best = true with eval.every = {asked_every} and checkpoint.every = {saved_every}: only "
            f"checkpoints of every {math.lcm(asked_every, saved_every)} steps would be rated; make one of the two a "
            "multiple of the other"
        ]
    return []


def _place(path: Sequence[str]) -> Place:
    return locate([int(part) if part.isdigit() else part for part in path], Recipe)


def _default_choice(path: Sequence[str]) -> dict[str, Any]:
    """A table that the recipe leaves out, as overrides find it: a choice has the `type` it has by default."""
    place = _place(path)
    if not is_choice(place.kind) or place.field is None or place.field.is_required():
        return {}
    return {"type": place.field.get_default(call_default_factory=True).type}


def _toml_value(text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, digits or brackets without end
        return text
    # Dates are TOML too, but no key of ours is one: `2024-01-01` names a file or a model.
    return value if isinstance(value, (str, int, float, bool, list, dict)) else text


def _owner(table: dict[str, Any], override: Override) -> dict[str, Any] | list[Any]:
    """The table or list that holds the override's last key; tables on the way are made."""
    owner: dict[str, Any] | list[Any] = table
    for depth, name in enumerate(override.path[:-1], 1):
        if isinstance(owner, list):
            inner = owner[_index(owner, name, override)]
        else:
            inner = owner.setdefault(name, _default_choice(override.path[:depth]))
        if not isinstance(inner, (dict, list)):
            raise ConfigurationError(f"{override.origin}: {override.key}: {name} is a value and has no keys of its own")
        owner = inner
    return owner


def _index(items: list[Any], name: str, override: Override) -> int:
    """A position in the list; the one after the last makes a new table."""
    if name.isdigit() and int(name) == len(items):
        items.append({})
    if not name.isdigit() or int(name) >= len(items):
        raise ConfigurationError(
            f"{override.origin}: {override.key}: '{name}' is no position in a list of {len(items)}; count from 0"
        )
    return int(name)
