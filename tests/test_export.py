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
        for parameter in learner.decoder.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
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
