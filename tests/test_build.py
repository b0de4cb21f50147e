"""Wiring: what a recipe asks for is what the parts are told."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qarl import build as build_module
from qarl.build import System, build, local_learner, on_device, scheme_plan
from qarl.checkpoint import CheckpointStore
from qarl.errors import ConfigurationError
from qarl.models.names import load_model
from qarl.ops.kernels import using
from qarl.ops.reference import ReferenceKernels
from qarl.quant import SchemePlan
from qarl.recipe import Recipe, load_recipe
from qarl.rollout.vllm import engine as vllm_engine
from qarl.rollout.vllm import launch
from qarl.rollout.vllm.engine import VllmEngine
from qarl.sync.compressed_tensors import FORMATS
from qarl.trained import model_named

SMOKE = Path(__file__).resolve().parents[1] / "recipes" / "smoke.toml"


def recipe_of(*overrides: str) -> Recipe:
    return load_recipe(SMOKE, overrides)


def test_the_parts_get_what_the_recipe_says() -> None:
    recipe = recipe_of("--seed=5", "--sampling.temperature=0.7", "--eval.temperature=0", "--eval.samples=1")
    system = build(recipe)
    assert (system.plan.seed, system.plan.steps, system.plan.group_size) == (5, 5, 4)
    assert system.plan.sampling.temperature == 0.7
    assert system.plan.sampling.max_new_tokens == 16
    assert system.questions is not None
    assert system.questions.sampling.temperature == 0.0
    assert len(system.questions.prompts) == 8
    assert system.cast.advantage is recipe.advantage
    stops = system.plan.sampling.stop_token_ids
    assert stops == system.questions.sampling.stop_token_ids and 258 in stops  # <|im_end|> of the byte tokenizer


def test_engine_and_learner_agree_bit_for_bit_after_wiring() -> None:
    system = build(recipe_of("--sampling.temperature=0.7"))
    learner, engine = system.cast.learner, system.cast.engine
    engine.load(learner.publish())
    groups = engine.generate(system.cast.prompts.take(0, 2), 4, system.plan.sampling, (0, 0))
    advantages = [torch.tensor([1.0, -1.0, 0.5, -0.5])] * 2
    assert learner.update(groups, advantages)["mismatch/max_abs"].value() == 0.0


def test_an_unaligned_learner_disagrees_and_the_account_says_so() -> None:
    system = build(recipe_of("--alignment=none"))
    learner, engine = system.cast.learner, system.cast.engine
    engine.load(learner.publish())
    groups = engine.generate(system.cast.prompts.take(0, 2), 4, system.plan.sampling, (0, 0))
    advantages = [torch.tensor([1.0, -1.0, 0.5, -0.5])] * 2
    assert learner.update(groups, advantages)["mismatch/max_abs"].value() > 0.0
    assert "alignment none: none, as asked" in system.account


def test_the_device_is_the_recipes_and_the_account_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "device auto: cpu (this build of torch knows no GPU" in build(recipe_of()).account or torch.version.cuda
    assert "device cpu: cpu (as asked)" in build(recipe_of("--device=cpu")).account
    with pytest.raises(ConfigurationError, match=r"device = 'cuda': .* GPU.*; or set device = 'cpu'"):
        build(recipe_of("--device=cuda"))


def test_tensors_go_where_the_operations_compute() -> None:
    kernels = ReferenceKernels()
    kernels.device = torch.device("meta")
    with using(kernels):
        model = on_device(load_model("tiny"))
    assert {tensor.device.type for tensor in model.tensors.values()} == {"meta"}


def test_without_the_c_kernels_the_account_promises_less() -> None:
    with using(ReferenceKernels()):
        assert "alignment auto: codes, not exact" in build(recipe_of()).account


def test_without_held_out_questions_there_are_none(tmp_path: Path) -> None:
    path = tmp_path / "bare.toml"
    path.write_text('model = "tiny"\n[prompts]\ntype = "arithmetic"\n[[rewards]]\ntype = "answer"\n')
    assert build(load_recipe(path)).questions is None


def test_prompt_and_completion_must_fit_the_model_s_context() -> None:
    with pytest.raises(ConfigurationError, match=r"1024 \+ sampling.max_new_tokens = 1025 exceed .* of 2048 tokens"):
        build(recipe_of("--sampling.max_new_tokens=1025"))


def test_a_completion_must_fit_the_cache() -> None:
    with pytest.raises(ConfigurationError, match=r"engine\.kv_bytes = 65536; raise it"):
        build(recipe_of("--engine.kv_bytes=65536"))


def test_rows_must_have_what_the_rewards_read() -> None:
    with pytest.raises(ConfigurationError, match="reward math: column `task` is missing from the row of prompt"):
        build(recipe_of("--rewards.0.type=reasoning_gym", "--rewards.0.name=math"))


def test_a_rule_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="matches no linear module"):
        build(recipe_of('--quant.rules."*.q_prj"=none'))


def test_the_account_shows_the_model_the_plan_and_the_first_prompt() -> None:
    account = build(recipe_of('--quant.rules."*.o_proj"=none')).account
    assert "model tiny: llama, 2 layers" in account
    assert "quantized 13 of 15 matrices" in account
    assert "optimizer adamw:\n  embedding  adamw lr 0.001" in account
    assert "  | What is " in account
    assert ", 257 " in account  # <|im_start|>, the first token of the first prompt


def test_every_row_of_a_file_is_checked_against_the_rewards_and_held_out_ones_too(tmp_path: Path) -> None:
    training, held_out = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    good = [f'{{"prompt": "{number}", "answer": "{number}"}}' for number in range(20)]
    bad = '{"prompt": "20", "answer": {"value": 20}}'
    for rows, tests in (([*good, bad], good), (good, [*good[:2], bad])):
        training.write_text("\n".join(rows), encoding="utf-8")
        held_out.write_text("\n".join(tests), encoding="utf-8")
        table = ["--prompts.type=file", f"--prompts.path={training}", f"--prompts.eval_path={held_out}"]
        with pytest.raises(ConfigurationError, match=r"the answer of prompt .* must be a text, a number"):
            build(recipe_of(*table, "--eval.count=3"))


def test_a_run_stands_for_the_model_of_its_newest_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="it has no checkpoint yet"):
        (tmp_path / "recipe.toml").touch()
        build(recipe_of(f"--model={tmp_path}"))
    learner = build(recipe_of()).cast.learner
    with torch.no_grad():
        learner.decoder.head_weight()[0, 0] = 7.0
    CheckpointStore(tmp_path / "checkpoints").save(3, learner.save, {})
    system = build(recipe_of(f"--model={tmp_path}"))
    assert system.cast.learner.decoder.head_weight()[0, 0] == 7.0
    assert f"model {tmp_path}/checkpoints/step-3/model: llama" in system.account
    assert build(recipe_of(f"--model={tmp_path}/checkpoints/step-3")).account == system.account


def test_the_account_counts_what_was_too_long(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"prompt": "1 + 1", "answer": "2"}\n' * 4 + '{"prompt": "' + "1 + " * 99 + '1", "answer": "100"}\n'
    )
    file = [f"--prompts={{type = 'file', path = '{rows}', on_long = 'skip', max_prompt_tokens = 100}}"]
    system = build(recipe_of(*file, "--eval.count=1", "--prompts.eval_fraction=0.2", "--prompts_per_step=2"))
    assert "prompts rendered with the chat template, 1 left out as too long; the first one" in system.account
    assert "3 of 3 prompts to train on are also held out" in "".join(system.warnings)


def test_rollouts_report_their_progress() -> None:
    told: list[tuple[int, int]] = []
    system = build(recipe_of(), lambda finished, total: told.append((finished, total)))
    system.cast.engine.load(system.cast.learner.publish())
    system.cast.engine.generate(system.cast.prompts.take(0, 2), 2, system.plan.sampling, (0, 0))
    assert told[-1] == (4, 4)


AWARE = "--quant.update_aware=2"


def masters(system: System) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in system.cast.learner.trained().items()}


def test_masters_are_folded_and_the_account_says_so() -> None:
    plain, system = build(recipe_of()), build(recipe_of(AWARE))
    gain, query, output = (
        f"model.layers.1.{name}.weight" for name in ("input_layernorm", "self_attn.q_proj", "self_attn.o_proj")
    )
    before, after = masters(plain), masters(system)
    assert torch.equal(after[gain], before[gain] * 2)
    assert torch.equal(after[query], before[query] / 2)
    assert torch.equal(after[output], before[output])
    assert "gains of 4 norms times 2, the 10 matrices that read them divided by it" in system.account
    assert "update-aware" not in plain.account


def test_only_what_is_quantized_is_folded() -> None:
    system = build(recipe_of(AWARE, '--quant.rules."*.mlp.*"=none'))
    assert "gains of 2 norms times 2, the 6 matrices" in system.account


def test_a_resumed_run_is_not_folded_again(tmp_path: Path) -> None:
    first = build(recipe_of(AWARE))
    store = CheckpointStore(tmp_path / "checkpoints", 2, False)
    checkpoint = store.save(0, first.cast.learner.save, {})
    resumed = build(recipe_of(AWARE))
    resumed.cast.learner.restore(checkpoint.folder)
    before, after = masters(first), masters(resumed)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert resumed.cast.learner.publish().checksum == first.cast.learner.publish().checksum


@pytest.mark.parametrize("rules", ["--scheme=none", '--quant.rules."*.[qkvgu]*_proj"=none'])
def test_folding_where_nothing_would_be_folded_is_refused(rules: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^quant\.update_aware = 2 has no effect: .* remove it, or quantize"):
        build(recipe_of(AWARE, rules))


def test_rates_are_scaled_and_the_account_says_so() -> None:
    account = build(recipe_of('--learner.lr_scales."*.down_proj.weight"=0.5')).account
    assert (
        "projection adamw lr 0.0005 decay 0: 2 tensors, 65,536 numbers: model.layers.*.mlp.down_proj.weight" in account
    )
    with pytest.raises(ConfigurationError, match=r'"\*\.down_proj" matches no trained parameter'):
        build(recipe_of('--learner.lr_scales."*.down_proj"=0.5'))


VLLM = "--engine.type=vllm"


def plan_of(*overrides: str) -> SchemePlan:
    recipe = recipe_of(VLLM, *overrides)
    return scheme_plan(model_named(recipe.model), recipe.scheme, recipe.quant, recipe.engine)


@pytest.mark.parametrize("scheme", ["none", *FORMATS])
def test_for_vllm_the_head_stays_whole_and_packed_scales_have_its_type(scheme: str) -> None:
    plan = plan_of(f"--scheme={scheme}", "--engine.dtype=float16")
    assert plan.choices["lm_head"].scheme.name == "none"
    assert len(plan.quantized) == (0 if scheme == "none" else 14)
    for one in plan.quantized.values():
        assert one.weight is not None
        assert one.weight.scale_dtype == (torch.float16 if one.packed else torch.float32)


def test_without_vllm_the_plan_is_as_before() -> None:
    recipe = recipe_of()
    model = model_named(recipe.model)
    plan = scheme_plan(model, recipe.scheme, recipe.quant, recipe.engine)
    assert plan == scheme_plan(model, recipe.scheme, recipe.quant)
    assert plan.choices["lm_head"].scheme.name == "w12a12-int12"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--scheme=w4a8-int8", r"q_proj: scheme 'w4a8-int8' is none that engine\.type = 'vllm' can serve; .* none,"),
        ('--quant.rules."*.down_proj"=w12a12-int12', r"layers\.0\.mlp\.down_proj: scheme 'w12a12-int12' is none that"),
        ("--quant.rules.lm_head=w8a8-int8", r"lm_head: scheme 'w8a8-int8' with .*, which multiplies the head in full"),
        (
            '--quant.rules."*"=fp8',
            r'lm_head: scheme \'fp8\' with .*; in \[quant\.rules\] let "lm_head" = "none" come last',
        ),
    ],
)
def test_a_scheme_that_vllm_cannot_serve_is_refused_by_the_modules_name(override: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_of(override)


def test_rules_that_leave_the_head_alone_are_followed() -> None:
    plan = plan_of('--quant.rules={"*" = "fp8", "lm_head" = "none"}')
    assert {scheme.name for scheme in plan.quantized.values()} == {"fp8"}
    assert plan.choices["lm_head"].scheme.name == "none"
    assert len(plan_of('--quant.rules."*.o_proj"=none').quantized) == 12


def test_only_the_native_engine_shares_the_learners_kernels() -> None:
    for overrides, shares in (((), True), ((VLLM,), False)):
        recipe = recipe_of(*overrides)
        model = model_named(recipe.model)
        learner = local_learner(recipe, model, scheme_plan(model, recipe.scheme, recipe.quant, recipe.engine))
        assert learner.shares_kernels == shares
        assert not learner.decoder.rounds_kv


def test_a_run_on_vllm_says_how_far_it_is_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "require_vllm", lambda: None)
    system = build(recipe_of(VLLM))
    assert isinstance(system.cast.engine, VllmEngine)
    assert (
        "alignment auto: codes: vLLM multiplies the learner's codes and scales by kernels of its own; mismatch/* says "
        "what is left" in system.account
    )
    assert (
        "codes and scales, and adapters rounded to bfloat16, by"
        in build(recipe_of(VLLM, "--learner.lora={rank=4}")).account
    )
    assert "alignment none: none, as asked" in build(recipe_of(VLLM, "--alignment=none")).account


def test_the_engine_gets_the_recipes_context_and_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[object, ...]] = []
    monkeypatch.setattr(build_module, "VllmEngine", lambda *arguments: told.append(arguments))
    recipe = recipe_of(
        VLLM, "--engine.urls=['http://node1:8000']", "--prompts.max_prompt_tokens=100", "--learner.lora={rank=4}"
    )
    model = model_named(recipe.model)
    renderer = recipe.prompts.renderer(model.tokenizer)
    build_module.make_engine_of(recipe, model.config, model.sampleable, renderer.decode)
    lora, context = recipe.learner.lora, 116  # of a prompt and a completion
    assert told == [
        (recipe.engine, "http://node1:8000", model.config, model.sampleable, context, renderer.decode, None, lora)
    ]


def test_without_vllm_a_run_on_it_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(launch, "version", missing)
    with pytest.raises(ConfigurationError, match="vLLM is not installed"):
        build(recipe_of(VLLM))
