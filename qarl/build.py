"""From a recipe to living objects: the only place that wires rooms together."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

import torch

from qarl import __version__
from qarl.cluster.crew import Crew, own_device
from qarl.cluster.follower import Follower
from qarl.cluster.leader import LeadersEngine, LeadingEngine, LeadingLearner, LeadingRanks
from qarl.cluster.masters import ShardedMasters
from qarl.cluster.ranks import CrewRanks
from qarl.cluster.ray import Actors
from qarl.doctor import scheme_kernels
from qarl.errors import ConfigurationError
from qarl.evaluate import EvalSet
from qarl.learner.learner import LocalLearner
from qarl.loop import Cast, Plan
from qarl.models.config import ModelConfig
from qarl.models.decoder import HEAD, Decoder
from qarl.models.fold import fold, foldable
from qarl.models.names import LoadedModel
from qarl.objectives.corrections import NoCorrection
from qarl.objectives.policy_loss import CorrectedObjective
from qarl.ops.device import place
from qarl.ops.kernels import compute_on, kernels
from qarl.prompts import Renderer, SplitSource, describe_prompt
from qarl.quant import QuantConfig, SchemePlan, plan_schemes, scheme_named
from qarl.recipe import Recipe, parse_recipe
from qarl.records import Prompt, Sampling
from qarl.rewards import Scorer
from qarl.roles import Advantage, Engine, PromptSource, Reward
from qarl.rollout.config import EngineConfig, NativeEngineConfig, VllmEngineConfig
from qarl.rollout.fleet import Fleet
from qarl.rollout.native import NativeEngine
from qarl.rollout.probe import identity
from qarl.rollout.request import Progress
from qarl.rollout.vllm.engine import VllmEngine
from qarl.sync.compressed_tensors import FORMATS
from qarl.trained import model_named


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
    compute_on(device_of(recipe, crew))
    model = model_named(recipe.model)
    _check_context(recipe, model.config)
    renderer = recipe.prompts.renderer(model.tokenizer)
    source = recipe.prompts.build(renderer, recipe.seed)
    stops = tuple(dict.fromkeys((*renderer.stop_token_ids, *model.stop_token_ids)))
    sampling = Sampling(recipe.sampling.temperature, recipe.sampling.max_new_tokens, stops)
    schemes = scheme_plan(model, recipe.scheme, recipe.quant, recipe.engine)
    make_engine = partial(make_engine_of, recipe, model.config, model.sampleable, renderer.decode)
    learner = local_learner(recipe, model, schemes, crew)
    scorer = Scorer(recipe.rewards)
    # All that a step may ask, so that too few rows are found now.
    first = source.take(0, recipe.prompts_per_step * recipe.sampling.max_rounds)[0]
    scorer.check(*source.known())
    if isinstance(recipe.engine, NativeEngineConfig):
        make_engine().check_fit([first], sampling)
    return System(
        cast=cast_of(source, engine_of(recipe, make_engine, progress), scorer, recipe.advantage, learner, crew),
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
                *([] if crew is None else [crew.describe(shards=recipe.learner.lora is None)]),
                describe_prompts(renderer, source.skipped, first),
            ]
        ),
        warnings=(*_warnings(recipe, schemes), *source.warnings),
    )


def build_follower(recipe: str, crew: Crew) -> Follower:
    """What another rank than the leader needs of a run: a learner and, unless engines are elsewhere, an engine."""
    resolved = parse_recipe(tomllib.loads(recipe), "the leader's recipe")
    compute_on(device_of(resolved, crew))
    model = model_named(resolved.model)
    engine = None
    if isinstance(resolved.engine, NativeEngineConfig) and resolved.cluster.engines == 0:
        decode = resolved.prompts.renderer(model.tokenizer).decode
        engine = NativeEngine(resolved.engine, model.config, model.sampleable, decode)
    schemes = scheme_plan(model, resolved.scheme, resolved.quant, resolved.engine)
    return Follower(crew, engine, local_learner(resolved, model, schemes, crew))


def cast_of(
    prompts: PromptSource,
    engine: Engine,
    reward: Reward,
    advantage: Advantage,
    learner: LocalLearner,
    crew: Crew | None,
) -> Cast:
    """Who plays in the loop; of a crew, engine and learner are those of all ranks, or the leader's engine alone."""
    if crew is None:
        return Cast(prompts, engine, reward, advantage, learner)
    # One that computes in this process has its like in every other.
    led = LeadingEngine(crew, engine) if isinstance(engine, NativeEngine) else LeadersEngine(crew, engine)
    return Cast(prompts, led, reward, advantage, LeadingLearner(crew, learner))


def device_of(recipe: Recipe, crew: Crew | None) -> torch.device:
    """Where this process computes; of a crew, every rank on a GPU of its own."""
    device = place(recipe.device).device
    return device if crew is None else own_device(device)


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


def engine_of(recipe: Recipe, make_engine: Callable[..., Engine], progress: Progress | None) -> Engine:
    """The recipe's engine: one in this process, or several elsewhere; without weights they serve nothing yet."""
    config = recipe.engine
    if isinstance(config, VllmEngineConfig) and len(config.urls) > 1:
        servers = config.urls
        return Fleet(lambda index, tell: make_engine(tell, servers[index]), len(servers), config.timeout_s, 0, progress)
    if recipe.cluster.engines == 0:
        return make_engine(progress)
    if isinstance(config, NativeEngineConfig) and kernels().device.type != "cpu":
        raise ConfigurationError(
            f"cluster.engines = {recipe.cluster.engines} with a learner on {kernels().device}: our engines in "
            "processes of their own compute on CPUs so far; set device = 'cpu', engine.type = 'vllm', or "
            "cluster.engines = 0"
        )
    # Only an aligned learner counts on the engine's bits, and only on those of our own.
    must_agree = None
    if recipe.alignment == "auto" and isinstance(config, NativeEngineConfig):
        must_agree = partial(identity, config, recipe.scheme)
    actors = Actors(recipe.cluster, make_engine, must_agree)
    cluster = recipe.cluster
    return Fleet(actors, cluster.engines, cluster.timeout_s, cluster.restarts, progress)


def make_engine_of(
    recipe: Recipe,
    model: ModelConfig,
    vocab_size: int,
    decode: Callable[[Sequence[int]], str],
    progress: Progress | None = None,
    url: str | None = None,
) -> NativeEngine | VllmEngine:
    """One engine of this recipe, in whichever process this is called; `url`, or the recipe's own, names a server."""
    config = recipe.engine
    if isinstance(config, NativeEngineConfig):
        return NativeEngine(config, model, vocab_size, decode, progress)
    url = url or (config.urls[0] if config.urls else None)
    return VllmEngine(config, url, model, vocab_size, recipe.longest_sequence, decode, progress, recipe.learner.lora)


def local_learner(recipe: Recipe, model: LoadedModel, schemes: SchemePlan, crew: Crew | None = None) -> LocalLearner:
    """A learner whose masters are the model's tensors; of a `crew`'s, some rows of them, which take their place.

    They are changed where the recipe's quantization is update-aware.
    """
    fold(model.tensors, _folded(recipe, model.config, schemes), recipe.quant.update_aware)
    engine = recipe.engine
    with torch.device("meta"):
        is_native = isinstance(engine, NativeEngineConfig)
        rounds_kv = recipe.alignment == "auto" and isinstance(engine, NativeEngineConfig) and engine.kv_cache == "int8"
        decoder = Decoder(model.config, model.sampleable, rounds_kv)
    ranks = None
    if crew is not None:
        ranks = LeadingRanks(crew) if crew.leads else CrewRanks(crew.exchange)
    if crew is None or recipe.learner.lora is not None:  # the base of adapters is frozen, and whole on every rank
        model = on_device(model)
    else:
        holder = ShardedMasters(crew.exchange, kernels().device)
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
        recipe.seed,
        recipe.model,
        shares_kernels=is_native,
        ranks=ranks,
    )


def _folded(recipe: Recipe, model: ModelConfig, schemes: SchemePlan) -> dict[str, tuple[str, ...]]:
    """The gains that `quant.update_aware` goes into, with the weights it comes from; ConfigurationError for none."""
    if recipe.quant.update_aware == 1.0:
        return {}
    found = foldable(model, schemes.quantized)
    if not found:
        raise ConfigurationError(
            f"quant.update_aware = {recipe.quant.update_aware:g} has no effect: it is for codes of the q, k and v or "
            f"the gate and up projections, and scheme = '{recipe.scheme}' with [quant.rules] quantizes none of them; "
            "remove it, or quantize them (in full precision, learner.lr_scales makes the same steps)"
        )
    return found


def on_device(model: LoadedModel) -> LoadedModel:
    """The model with its tensors where the operations compute."""
    return replace(model, tensors={name: tensor.to(kernels().device) for name, tensor in model.tensors.items()})


def scheme_plan(
    model: LoadedModel, scheme: str, exceptions: QuantConfig, engine: EngineConfig | None = None
) -> SchemePlan:
    """Which matrix of the model gets which scheme; ConfigurationError for one that the engine cannot serve."""
    with torch.device("meta"):
        matrices = Decoder(model.config, model.sampleable).matrices()
    if not isinstance(engine, VllmEngineConfig):
        return plan_schemes(matrices, scheme_named(scheme), exceptions)
    # vLLM has no head like the one that integer schemes have by default.
    is_ruled = any(fnmatchcase(HEAD, pattern) for pattern in exceptions.rules)
    rules = exceptions.rules if is_ruled else {HEAD: "none"} | exceptions.rules
    plan = plan_schemes(matrices, scheme_named(scheme), QuantConfig(rules=rules))
    for module, one in plan.quantized.items():
        if module == HEAD:
            raise ConfigurationError(
                f"{HEAD}: scheme '{one.name}' with engine.type = 'vllm', which multiplies the head in full precision; "
                f'in [quant.rules] let "{HEAD}" = "none" come last'
            )
        if one.name not in FORMATS:
            raise ConfigurationError(
                f"{module}: scheme '{one.name}' is none that engine.type = 'vllm' can serve; these are: none, "
                f"{', '.join(FORMATS)}"
            )
    return plan.with_scales_in(getattr(torch, engine.dtype))


def describe(recipe: Recipe, model: LoadedModel, schemes: SchemePlan, learner: LocalLearner) -> str:
    """What a recipe resolved to, for people."""
    parameters = sum(tensor.numel() for tensor in model.tensors.values())
    return "\n".join(
        [
            f"qarl {__version__}, torch {torch.__version__}, {kernels().name} kernels, "
            f"{torch.get_num_threads()} threads",
            f"device {recipe.device}: {place(recipe.device).describe()}",
            f"model {model.name}: {model.config.family}, {model.config.num_layers} layers, {parameters / 1e6:.1f} M "
            f"parameters, {model.sampleable} tokens",
            f"scheme {recipe.scheme}: {schemes.describe()}",
            *_update_aware(recipe, model.config, schemes),
            f"alignment {recipe.alignment}: {_alignment_level(recipe)}",
            *_engines_elsewhere(recipe),
            _describe_training(recipe, learner),
            f"optimizer {recipe.learner.optimizer.type}:",
            *(f"  {line}" for line in learner.optimizer.describe().splitlines()),
        ]
    )


def _update_aware(recipe: Recipe, model: ModelConfig, schemes: SchemePlan) -> list[str]:
    folded = _folded(recipe, model, schemes)
    if not folded:
        return []
    return [
        f"update-aware quantization: gains of {len(folded)} norms times {recipe.quant.update_aware:g}, the "
        f"{sum(map(len, folded.values()))} matrices that read them divided by it"
    ]


def _describe_training(recipe: Recipe, learner: LocalLearner) -> str:
    if recipe.learner.lora is None:
        return "training all parameters"
    numbers = sum(tensor.numel() for tensor in learner.trained().values())
    lora = recipe.learner.lora
    return (
        f"training adapters of {len(learner.trained()) // 2} matrices, rank {lora.rank}, alpha {lora.alpha:g}: "
        f"{numbers / 1e6:.1f} M parameters; everything else is frozen"
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


def _alignment_level(recipe: Recipe) -> str:
    if recipe.alignment == "none":
        return "none, as asked: the learner computes in full precision; watch mismatch/* and consider a correction"
    if not isinstance(recipe.engine, NativeEngineConfig):
        adapters = "" if recipe.learner.lora is None else f", and adapters rounded to {recipe.engine.dtype},"
        return (
            f"codes: vLLM multiplies the learner's codes and scales{adapters} by kernels of its own; mismatch/* says "
            "what is left"
        )
    if not kernels().exact_matmul:
        return "codes, not exact: without the C kernels floating-point sums may depend on the batch, see `qarl doctor`"
    return "exact, engine and learner share every operation"


def _engines_elsewhere(recipe: Recipe) -> list[str]:
    cluster = recipe.cluster
    if cluster.engines == 0:
        return []
    where = f"the Ray cluster {cluster.ray_address}" if cluster.ray_address else "this machine"
    is_checked = recipe.alignment == "auto" and isinstance(recipe.engine, NativeEngineConfig)
    checked = "; their kernels, instructions and a probe of log-probabilities equal the learner's"
    return [
        f"engines: {cluster.engines} processes on {where}, threads each {cluster.engine_cpus}"
        f"{checked if is_checked else ''}"
    ]


def _held_out(recipe: Recipe, source: SplitSource, sampling: Sampling) -> EvalSet | None:
    if recipe.eval is None:
        return None
    return eval_set(recipe, source.held_out(recipe.eval.count), sampling)


def _check_context(recipe: Recipe, model: ModelConfig) -> None:
    if recipe.longest_sequence > model.max_position_embeddings:
        raise ConfigurationError(
            f"prompts.max_prompt_tokens = {recipe.prompts.max_prompt_tokens} + sampling.max_new_tokens = "
            f"{recipe.sampling.max_new_tokens} exceed the model's context of {model.max_position_embeddings} tokens; "
            "lower one of them"
        )
