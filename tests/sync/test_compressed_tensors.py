"""What others are told about stored weights, and that they accept it."""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationStrategy

from qarl.errors import ConfigurationError, RunError
from qarl.quant import SCHEMES, dequantize, quantize
from qarl.sync.checksum import checksum
from qarl.sync.compressed_tensors import FORMATS, check_exportable, from_stored, quantization_config, stored

MODULES = ("a.q_proj", "a.k_proj", "b.down_proj")
every_form = pytest.mark.parametrize("scheme", FORMATS)


@every_form
def test_the_library_reads_the_weight_that_we_multiply(scheme: str) -> None:
    quantized = quantize(torch.randn(130, 256), SCHEMES[scheme], "a.q_proj")
    tensors = {"a.q_proj.weight": quantized.codes, "a.q_proj.weight_scale": quantized.scale}
    config = QuantizationConfig.model_validate(quantization_config({"a.q_proj": scheme}, MODULES))
    group = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(FORMATS[scheme])
    local = {name.removeprefix("a.q_proj."): tensor for name, tensor in stored(tensors, {"a.q_proj": scheme}).items()}
    found = compressor.decompress(local, group)["weight"]
    assert torch.equal(found.float(), dequantize(quantized))


@every_form
def test_a_scheme_that_all_share_is_that_of_every_linear_layer_but_the_ignored(scheme: str) -> None:
    config = quantization_config({"a.q_proj": scheme, "a.k_proj": scheme}, MODULES)
    assert config["ignore"] == ["b.down_proj", "lm_head"]
    assert config["format"] == FORMATS[scheme]
    assert [group["targets"] for group in config["config_groups"].values()] == [["Linear"]]
    assert QuantizationConfig.model_validate(config).config_groups["group_0"].weights.symmetric


def test_the_details_of_each_scheme() -> None:
    def groups(scheme: str) -> tuple[dict[str, object], dict[str, object] | None]:
        group = quantization_config({"a.q_proj": scheme}, MODULES)["config_groups"]["group_0"]
        return group["weights"], group["input_activations"]

    symmetric = {"symmetric": True}
    assert groups("w8a8-int8") == (
        symmetric | {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "channel"},
        symmetric | {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"},
    )
    assert groups("w4a16-g64") == (
        symmetric | {"num_bits": 4, "type": "int", "dynamic": False, "strategy": "group", "group_size": 64},
        None,
    )
    assert groups("fp8-block") == (
        symmetric
        | {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "block", "block_structure": [128, 128]},
        symmetric | {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "group", "group_size": 128},
    )


def test_several_schemes_list_their_modules() -> None:
    config = quantization_config({"a.q_proj": "w8a8-int8", "a.k_proj": "w8a8-int8", "b.down_proj": "fp8"}, MODULES)
    assert config["format"] == "mixed-precision"
    targets = {group["format"]: group["targets"] for group in config["config_groups"].values()}
    assert targets == {"float-quantized": ["b.down_proj"], "int-quantized": ["a.k_proj", "a.q_proj"]}
    read = QuantizationConfig.model_validate(config).config_groups["group_1"]
    assert read.weights.strategy == QuantizationStrategy.CHANNEL


@pytest.mark.parametrize("scheme", sorted(set(SCHEMES) - set(FORMATS) - {"none"}))
def test_a_scheme_that_nobody_else_reads_is_refused(scheme: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"a: scheme '{scheme}' has no compressed-tensors form .* --format hf"
    ):
        check_exportable({"a": scheme})


@pytest.mark.parametrize("scheme", sorted(set(SCHEMES) - {"none"}))
def test_what_was_stored_comes_back(scheme: str) -> None:
    quantized = quantize(torch.randn(130, 256), SCHEMES[scheme], "a.q_proj")
    tensors = {"a.q_proj.weight": quantized.codes, "a.q_proj.weight_scale": quantized.scale, "norm": torch.ones(3)}
    schemes = {"a.q_proj": scheme}
    between = stored(tensors, schemes)
    found = from_stored(between, schemes, "here")
    assert checksum(found) == checksum(tensors)  # names, types, shapes and bytes
    assert ("a.q_proj.weight" in between) != SCHEMES[scheme].packed
    assert stored(found, schemes).keys() == between.keys()


def test_a_last_word_that_is_not_full_is_cut_by_the_shape() -> None:
    codes = torch.randint(-7, 8, (3, 13), dtype=torch.int8)
    schemes = {"a": "w4a16"}
    between = stored({"a.weight": codes}, schemes)
    assert (list(between["a.weight_packed"].shape), between["a.weight_shape"].tolist()) == ([3, 2], [3, 13])
    assert torch.equal(from_stored(between, schemes, "here")["a.weight"], codes)


@pytest.mark.parametrize("part", ["weight_packed", "weight_shape"])
def test_a_part_that_is_missing_is_named_with_the_place(part: str) -> None:
    between = stored({"a.weight": torch.zeros(2, 8, dtype=torch.int8)}, {"a": "w4a16"})
    del between[f"a.{part}"]
    with pytest.raises(RunError, match=rf"^broadcast: tensor a\.{part} is missing; write the snapshot again$"):
        from_stored(between, {"a": "w4a16"}, "broadcast")
