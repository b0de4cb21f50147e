from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qarl.errors import ConfigurationError
from qarl.models.config import ModelConfig
from qarl.models.decoder import Decoder
from qarl.models.names import TINY_CONFIG
from qarl.models.parameters import check_names, master_weight, parameter_shapes

CONFIGS = {
    "llama, tied": TINY_CONFIG,
    "llama, untied": replace(TINY_CONFIG, tie_embeddings=False),
    "llama, biased": replace(TINY_CONFIG, attention_bias=True, output_bias=True, mlp_bias=True),
    "mistral": replace(TINY_CONFIG, family="mistral"),
    "qwen2": replace(TINY_CONFIG, family="qwen2", attention_bias=True),
    "qwen3": replace(TINY_CONFIG, family="qwen3", qk_norm=True, head_dim=64),
}


@pytest.fixture(params=CONFIGS.values(), ids=list(CONFIGS))
def config(request) -> ModelConfig:
    return request.param


def test_names_and_shapes_are_those_of_transformers(config):
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.to_hf()))
    assert parameter_shapes(config) == {name: tuple(weight.shape) for name, weight in theirs.named_parameters()}


def test_names_and_shapes_are_those_of_the_decoder(config):
    with torch.device("meta"):
        decoder = Decoder(config)
    assert parameter_shapes(config) == {name: tuple(weight.shape) for name, weight in decoder.named_parameters()}


def test_missing_and_unexpected_tensors_are_named():
    shapes = {"a": (1,), "b": (1,), "c": (1,), "d": (1,), "lm_head.weight": (1,)}
    with pytest.raises(ConfigurationError, match=r"^f: tensors a, b, c and 1 more are missing$"):
        check_names({"lm_head.weight"}, shapes, "f")
    with pytest.raises(ConfigurationError, match=r"^f: tensor lm_head\.weight is missing.*tie_word_embeddings"):
        check_names({"a", "b", "c", "d"}, shapes, "f")
    with pytest.raises(ConfigurationError, match=r"^f: tensor extra is not part"):
        check_names([*shapes, "extra"], shapes, "f")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_master_weight_is_an_exact_copy(dtype):
    stored = torch.tensor([1.5, -2.0, 2.0**-14], dtype=dtype)
    weight = master_weight(stored, "w", (3,), "f")
    assert weight.dtype == torch.float32
    assert weight.tolist() == [1.5, -2.0, 2.0**-14]
    stored.zero_()
    assert weight.tolist() == [1.5, -2.0, 2.0**-14]


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (torch.zeros(2, 3), r"f: tensor w has shape \[2, 3\], the configuration needs \[3\]"),
        (torch.zeros(3, dtype=torch.int8), "f: tensor w is int8"),
        (torch.tensor([0.0, float("nan"), 1.0]), "f: tensor w has NaN or infinite values"),
        (torch.tensor([float("inf"), float("-inf"), 1.0]), "f: tensor w has NaN or infinite values"),
    ],
)
def test_a_tensor_that_cannot_be_a_master_weight_is_refused(stored, message):
    with pytest.raises(ConfigurationError, match=message):
        master_weight(stored, "w", (3,), "f")
