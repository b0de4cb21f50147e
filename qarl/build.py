"""From a recipe to living objects: the only place that wires rooms together."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from qarl import __version__
from qarl.cluster.crew import Crew
from qarl.cluster.follower import Follower
from qarl.cluster.leader import LeadingEngine, LeadingLearner, LeadingRanks
from qarl.cluster.masters import ShardedMasters
from qarl.cluster.ranks import CrewRanks
from qarl.doctor import scheme_kernels
from qarl.errors import ConfigurationError
from qarl.evaluate import EvalSet
from qarl.learner.learner import LocalLearner
from qarl.loop import Cast, Plan
from qarl.models.config import ModelConfig
from qarl.models.decoder import Decoder
from qarl.models.names import LoadedModel, load_model
from qarl.objectives.corrections import NoCorrection
from qarl.objectives.policy_loss import CorrectedObjective
from qarl.ops.kernels import kernels
from qarl.prompts import Renderer, SplitSource, describe_prompt
from qarl.quant import QuantConfig, SchemePlan, plan_schemes, scheme_named
from qarl.recipe import Recipe, parse_recipe
from qarl.records import Prompt, Sampling
from qarl.rewards import Scorer
from qarl.rollout.native import NativeEngine, Progress
from qarl.runfolder import checkpoint_at, run_at


@dataclass(frozen=True, slots=True, eq=False)
class System:
    """Everything a run needs. `account` tells people what was resolved, the rendered first prompt included, and
    `warnings` what they may not have meant.
    """

    cast: Cast
    plan: Plan
    questions: EvalSet | None
    account: str
    warnings: tuple[str, ...] = ()


def build(recipe: Recipe, progress: Progress | None = None, crew: Crew | None = None) -> System:
    """Load the model and make every part; ConfigurationError for whatever cannot work, before any training.

    `progress` is told (finished, all) completions during rollouts. With a `crew`, which this process leads, engine and
    learner are those of all its ranks.
    """
    model = load_model(_model_of_run(recipe.model))
    _check_context(recipe, model.config)
    renderer = recipe.prompts.renderer(model.tokenizer)
    source = recipe.prompts.build(renderer, recipe.seed)
    stops = tuple(dict.fromkeys((*renderer.stop_token_ids, *model.stop_token_ids)))
    sampling = Sampling(recipe.sampling.temperature, recipe.sampling.max_new_tokens, stops)
    schemes = scheme_plan(model, recipe.scheme, recipe.quant)
    engine = NativeEngine(recipe.engine, model.config, model.sampleable, renderer.decode, progress)
    learner = local_learner(recipe, model, schemes, crew)
    scorer = Scorer(recipe.rewards)
    # All that a step may ask, so that too few rows are found now.
    first = source.take(0, recipe.prompts_per_step * recipe.sampling.max_rounds)[0]
    scorer.check(*source.known())
    engine.check_fit([first], sampling)
    return System(
        cast=Cast(
            source,
            engine if crew is None else LeadingEngine(crew, engine),
            scorer,
            recipe.advantage,
            learner if crew is None else LeadingLearner(crew, learner),
        ),
        plan=Plan(
            recipe.seed,
            recipe.steps,
            recipe.prompts_per_step,
            recipe.group_size,
            sampling,
            recipe.sampling.max_rounds,
        ),
        questions=_held_out(recipe, source, sampling),
        account="\n".join(
            [
                describe(recipe, model, schemes, learner),
                *([] if crew is None else [crew.describe()]),
                describe_prompts(renderer, source.skipped, first),
            ]
        ),
        warnings=(*_warnings(recipe, schemes), *source.warnings),
    )


def build_follower(recipe: str, crew: Crew) -> Follower:
    """What another rank than the leader needs of a run: an engine and a learner."""
    resolved = parse_recipe(tomllib.loads(recipe), "the leader's recipe")
    model = load_model(_model_of_run(resolved.model))
    decode = resolved.prompts.renderer(model.tokenizer).decode
    engine = NativeEngine(resolved.engine, model.config, model.sampleable, decode)
    schemes = scheme_plan(model, resolved.scheme, resolved.quant)
    return Follower(crew, engine, local_learner(resolved, model, schemes, crew))


def _warnings(recipe: Recipe, schemes: SchemePlan) -> tuple[str, ...]:
    found = []
    uncorrected = isinstance(recipe.objective, CorrectedObjective) and isinstance(
        recipe.objective.correction, NoCorrection
    )
    if recipe.alignment == "none" and schemes.quantized and uncorrected:
        found.append(
            "alignment = 'none' with quantized rollouts and no correction: the learner trains a policy that did not "
            "produce the data; watch mismatch/*, or set objective.correction"
        )
    here = scheme_kernels()
    emulated = sorted({scheme.name for scheme in schemes.quantized.values() if here[scheme.name].state == "emulated"})
    if emulated:
        found.append(f"{', '.join(emulated)}: emulated in fp32 on this machine, right but slow (`qarl doctor`)")
    return tuple(found)


def local_learner(recipe: Recipe, model: LoadedModel, schemes: SchemePlan, crew: Crew | None = None) -> LocalLearner:
    """A learner whose masters are the model's tensors; of a `crew`'s, some rows of them, which take their place."""
    with torch.device("meta"):
        rounds_kv = recipe.engine.kv_cache == "int8" and recipe.alignment == "auto"
        decoder = Decoder(model.config, model.sampleable, rounds_kv)
    ranks = None
    if crew is not None:
        ranks = LeadingRanks(crew) if crew.leads else CrewRanks(crew.exchange)
        holder = ShardedMasters(crew.exchange)
        decoder.held_by(holder)
        for name in model.tensors:
            model.tensors[name] = holder.shard(model.tensors[name])  # one by one, so that the whole ones go
    decoder.assign(model.tensors, requires_grad=True)
    return LocalLearner(
        recipe.learner,
        decoder,
        recipe.objective,
        schemes.quantized,
        recipe.alignment,
        recipe.sampling.temperature,
        recipe.sampling.max_new_tokens,
        recipe.steps,
        model.tokenizer,
        model.stop_token_ids,
        ranks,
    )


def scheme_plan(model: LoadedModel, scheme: str, exceptions: QuantConfig) -> SchemePlan:
    """Which matrix of the model gets which scheme."""
    with torch.device("meta"):
        matrices = Decoder(model.config, model.sampleable).matrices()
    return plan_schemes(matrices, scheme_named(scheme), exceptions)


def describe(recipe: Recipe, model: LoadedModel, schemes: SchemePlan, learner: LocalLearner) -> str:
    """What a recipe resolved to, for people."""
    parameters = sum(tensor.numel() for tensor in model.tensors.values())
    return "\n".join(
        [
            f"qarl {__version__}, torch {torch.__version__}, {kernels().name} kernels, "
            f"{torch.get_num_threads()} threads",
            f"model {model.name}: {model.config.family}, {model.config.num_layers} layers, {parameters / 1e6:.1f} M "
            f"parameters, {model.sampleable} tokens",
            f"scheme {recipe.scheme}: {schemes.describe()}",
            f"alignment {recipe.alignment}: {_alignment_level(recipe.alignment)}",
            f"optimizer {recipe.learner.optimizer.type}:",
            *(f"  {line}" for line in learner.optimizer.describe().splitlines()),
        ]
    )


def describe_prompts(renderer: Renderer, skipped: int, first: Prompt) -> str:
    """How questions are put to the model, with the first one as the model sees it."""
    rendered = "with the chat template" if renderer.chat else "as plain text"
    left_out = f", {skipped} left out as too long" if skipped else ""
    return f"prompts rendered {rendered}{left_out}; the first one, {describe_prompt(first)}"


def eval_set(recipe: Recipe, prompts: Sequence[Prompt], sampling: Sampling) -> EvalSet:
    """These questions, asked as the recipe's `[eval]` says and otherwise as in training (`sampling`)."""
    config = recipe.eval
    assert config is not None
    sampling = replace(sampling, temperature=config.temperature)
    return EvalSet(config.name, prompts, config.samples, sampling, config.correct_term, recipe.max_reward_error_share)


def _model_of_run(model: str) -> str:
    """For a run or a checkpoint the model it holds, else what was given."""
    path = Path(model)
    return model if run_at(path) is None else str(checkpoint_at(path).folder / "model")


def _alignment_level(alignment: str) -> str:
    if alignment == "none":
        return "none, as asked: the learner computes in full precision; watch mismatch/* and consider a correction"
    if not kernels().exact_matmul:
        return "codes, not exact: without the C kernels floating-point sums may depend on the batch, see `qarl doctor`"
    return "exact, engine and learner share every operation"


def _held_out(recipe: Recipe, source: SplitSource, sampling: Sampling) -> EvalSet | None:
    if recipe.eval is None:
        return None
    return eval_set(recipe, source.held_out(recipe.eval.count), sampling)


def _check_context(recipe: Recipe, model: ModelConfig) -> None:
    longest = recipe.prompts.max_prompt_tokens + recipe.sampling.max_new_tokens
    if longest > model.max_position_embeddings:
        raise ConfigurationError(
            f"prompts.max_prompt_tokens = {recipe.prompts.max_prompt_tokens} + sampling.max_new_tokens = "
            f"{recipe.sampling.max_new_tokens} exceed the model's context of {model.max_position_embeddings} tokens; "
            "lower one of them"
        )
