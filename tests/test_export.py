"""`qarl export`: what was trained and served, as others read it."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl.build import build
from qarl.checkpoint import CheckpointStore
from qarl.errors import ConfigurationError
from qarl.export import export
from qarl.models.names import load_model
from qarl.recipe import load_recipe, to_toml
from qarl.run import FORMAT
from qarl.sync.compressed_tensors import FORMATS

SMOKE = Path(__file__).resolve().parents[1] / "recipes" / "smoke.toml"


def run_of(folder: Path, *overrides: str) -> Path:
    """A run folder with one checkpoint, of weights that were moved a little."""
    recipe = load_recipe(SMOKE, overrides)
    folder.mkdir()
    (folder / "recipe.toml").write_text(to_toml(recipe))
    learner = build(recipe).cast.learner
    with torch.no_grad():
        for tensor in learner.trained().values():
            tensor.add_(0.01 * torch.randn_like(tensor))
    learner._snapshot = learner._requantize()
    learner.version = 3
    CheckpointStore(folder / "checkpoints").save(3, learner.save, {"format": FORMAT, "version": 3, "prompts": ""})
    return folder


@pytest.mark.parametrize("scheme", FORMATS)
def test_what_was_served_is_read_by_the_library(tmp_path: Path, scheme: str) -> None:
    run = run_of(tmp_path / "run", f"--scheme={scheme}", "--quant.rules.lm_head=none")
    found = export(str(run), "compressed-tensors", tmp_path / "out")
    assert (found["version"], found["notes"]) == (3, [])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    group = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config["format"])

    learner = build(load_recipe(run / "recipe.toml")).cast.learner
    learner.restore(run / "checkpoints" / "step-3")
    operands = learner.publish().operands
    assert operands is not None
    for projection in learner.decoder.projections():
        parts = []
        for module in projection.names:
            local = {
                name.rpartition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{module}.")
            }
            parts.append(compressor.decompress(local, group)["weight"].float())
        assert torch.equal(torch.cat(parts), operands[projection.names[0]].dense())
    assert torch.equal(tensors["model.embed_tokens.weight"], learner.decoder.model.embed_tokens.weight)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("1 + 1")


def test_masters_are_read_by_transformers(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    found = export(str(run / "checkpoints" / "step-3"), "hf", tmp_path / "out")
    masters = load_model(str(run / "checkpoints" / "step-3" / "model")).tensors
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in masters.items())
    assert found["bytes"] > sum(tensor.nbytes for tensor in masters.values())


def test_a_model_is_quantized_as_asked_and_a_quantized_head_is_told_of(tmp_path: Path) -> None:
    found = export("tiny", "compressed-tensors", tmp_path / "out", "w8a8-int8")
    note = "the head was served as w12a12-int12 and is written in full precision: log-probabilities differ"
    assert found["notes"] == [note]
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


LORA = ("--learner.lora.rank=4", '--learner.lora.targets=["*.q_proj", "*.down_proj"]')


def test_adapters_are_written_alone_or_merged_into_the_masters(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", *LORA)
    found = export(str(run), "lora", tmp_path / "adapters")
    assert (found["format"], found["version"], found["notes"]) == ("lora", 3, [])
    assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny"
    export(str(run), "hf", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    adapters, base = load_file(tmp_path / "adapters" / "adapter_model.safetensors"), load_model("tiny").tensors
    a, b = (adapters[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight"] for part in "AB")
    q = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(merged[q], base[q] + 8 * b @ a)
    assert torch.equal(merged["model.layers.0.self_attn.k_proj.weight"], base["model.layers.0.self_attn.k_proj.weight"])


def test_beside_adapters_the_codes_of_their_base_are_written_and_told_of(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", *LORA, "--quant.rules.lm_head=none")
    found = export(str(run), "compressed-tensors", tmp_path / "out")
    assert found["notes"] == [
        "this is the base without its adapters: write them with --format lora, and serve both together"
    ]
    export("tiny", "compressed-tensors", tmp_path / "base", "w8a8-int8")
    ours, base = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "base"))
    assert ours.keys() == base.keys()
    assert all(torch.equal(ours[name], base[name]) for name in base)


def test_a_run_without_adapters_has_none_to_write(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    for source in (str(run), "tiny"):
        with pytest.raises(ConfigurationError, match=r"has no adapters, for it is no run with \[learner\.lora\]"):
            export(source, "lora", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_peft_computes_what_the_learner_does(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    run = run_of(tmp_path / "run", *LORA, "--scheme=none")
    export(str(run), "lora", tmp_path / "adapters")
    export("tiny", "hf", tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    learner = build(load_recipe(run / "recipe.toml")).cast.learner
    learner.restore(run / "checkpoints" / "step-3")
    tokens = torch.arange(1, 60)
    with torch.no_grad():
        theirs, plain = model(tokens[None]).logits[0], model.get_base_model()
        with model.disable_adapter():
            without = plain(tokens[None]).logits[0]
    ours = learner.decoder.full_logits(tokens)
    theirs, without = theirs[:, : ours.shape[1]], without[:, : ours.shape[1]]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert (theirs - without).abs().max() > 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny", "compressed-tensors", None), "is no run, so its weights have no scheme yet; give --scheme"),
        (("tiny", "compressed-tensors", "none"), "no layer is quantized; export the masters with --format hf"),
        (("tiny", "compressed-tensors", "w4a8-int8"), "scheme 'w4a8-int8' has no compressed-tensors form"),
        (("tiny", "hf", "w8a8-int8"), "the masters are not quantized; leave it out with --format hf"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_nothing_written(
    tmp_path: Path, arguments: tuple[str, object, str | None], message: str
) -> None:
    source, form, scheme = arguments
    with pytest.raises(ConfigurationError, match=message):
        export(source, form, tmp_path / "out", scheme)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_a_run_has_its_own_scheme(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    with pytest.raises(ConfigurationError, match="is a run, which has its own scheme"):
        export(str(run), "compressed-tensors", tmp_path / "out", "fp8")


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(ConfigurationError, match="exists and is not an empty folder"):
        export("tiny", "hf", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
