from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from qarl.errors import ConfigurationError
from qarl.models.config import ModelConfig, rope_tables
from qarl.models.rope import RopeConfig

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
SIZES = {key: value for key, value in LLAMA.items() if key not in ("model_type", "architectures", "hidden_act")}
WINDOWED_QWEN = {
    **LLAMA,
    "model_type": "qwen2",
    "architectures": None,
    "use_sliding_window": True,
    "sliding_window": 64,
    "max_window_layers": 1,
}
ROPES = {
    "default": RopeConfig(theta=1e5),
    "linear": RopeConfig("linear", 1e4, 4.0),
    "llama3": RopeConfig("llama3", 5e5, 8.0, 64, 1.0, 4.0),
    "yarn": RopeConfig("yarn", 1e4, 4.0, 2048),
    "yarn with mscale": RopeConfig("yarn", 1e4, 40.0, 64, mscale=1.0, mscale_all_dim=0.5),
    "yarn without truncation": RopeConfig("yarn", 1e4, 3.0, 2048, beta_fast=16.0, beta_slow=2.0, truncate=False),
}


def test_a_version_4_config_is_read():
    config = ModelConfig.from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": None})
    assert config == ModelConfig(
        family="llama",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rope=RopeConfig(theta=5e5),
        norm_eps=1e-5,
    )


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True), ("llama", True, True, True, False)),
        (MistralConfig(**SIZES, sliding_window=None), ("mistral", False, False, False, False)),
        (Qwen2Config(**SIZES), ("qwen2", True, False, False, False)),
        (Qwen3Config(**SIZES, head_dim=16), ("qwen3", False, False, False, True)),
    ],
)
def test_each_family_has_its_biases_and_norms(theirs, expected):
    config = ModelConfig.from_hf(theirs.to_dict())
    found = (config.family, config.attention_bias, config.output_bias, config.mlp_bias, config.qk_norm)
    assert found == expected
    assert config.head_dim == (16 if config.family == "qwen3" else 8)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("rope", ROPES.values(), ids=list(ROPES))
def test_written_configs_are_read_the_same_by_us_and_by_transformers(family, rope):
    biased = family == "qwen2"
    config = replace(
        ModelConfig.from_hf(LLAMA), family=family, rope=rope, attention_bias=biased, qk_norm=family == "qwen3"
    )
    assert ModelConfig.from_hf(config.to_hf()) == config
    theirs = AutoConfig.for_model(**config.to_hf())
    assert ModelConfig.from_hf(theirs.to_dict()) == config


@pytest.mark.parametrize("rope", ROPES.values(), ids=list(ROPES))
def test_rope_tables_have_the_bits_of_transformers(rope):
    config = replace(ModelConfig.from_hf(LLAMA), rope=rope, head_dim=16)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**config.to_hf()))
    cosines, sines = theirs(torch.zeros(1), torch.arange(300)[None])
    ours = rope_tables(config, 300)
    assert torch.equal(ours[0], cosines[0, :, :8])
    assert torch.equal(ours[1], sines[0, :, :8])


def test_a_longer_rope_table_starts_with_the_bits_of_a_shorter_one():
    config = ModelConfig.from_hf({**LLAMA, "head_dim": 10})
    long = rope_tables(config, 1500)
    for length in (1, 7, 33, 1023):
        short = rope_tables(config, length)
        assert torch.equal(short[0], long[0][:length])
        assert torch.equal(short[1], long[1][:length])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "qwen3_moe"}, "mixture-of-experts.*qwen3_moe"),
        ({"model_type": "mixtral"}, "mixture-of-experts"),
        ({"num_local_experts": 8}, "mixture-of-experts.*num_local_experts"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"quantization_config": {"quant_method": "gptq"}}, "already quantized.*gptq"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16}, "sliding_window = 16"),
        ({"model_type": "mistral", "architectures": None, "sliding_window": 64}, "sliding_window = 64"),
        (WINDOWED_QWEN, "sliding_window = 64"),
        ({"vocab_size": None}, "key vocab_size is missing"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size 32"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a number from 0 to 1"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of names"),
        ({"architectures": [7]}, "architectures must be a list of names"),
        ({"layer_types": [{}]}, "layer_types must be a list of names"),
        ({"model_type": "mistral", "architectures": None, "sliding_window": "all"}, "sliding_window must be a whole"),
        ({**WINDOWED_QWEN, "max_window_layers": "1"}, "max_window_layers must be a whole number"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_theta": 10**400}, "the rope parameters give no rotary embedding"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1e308}}, "the rope parameters give no rotary"),
        ({"rope_scaling": {"type": "linear", "factor": 1e-45}}, "frequencies that are not finite"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, more than"),
        ({"head_dim": 2**40}, "head_dim is 1099511627776, more than"),
        ({"vocab_size": 2**31 + 1}, "vocab_size is 2147483649, more than"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.XModel"}}, r"auto_map: 'modeling_x\.XModel'.*never run"),
        ({"auto_map": ["modeling_x.XModel"]}, r"auto_map: \['modeling_x\.XModel'\]"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, named):
    with pytest.raises(ConfigurationError, match=rf"^here/config\.json: .*{named}"):
        ModelConfig.from_hf({**LLAMA, **change}, "here/config.json")


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mistral", "architectures": None, "sliding_window": None},
        {"model_type": "mistral", "architectures": None, "sliding_window": 128},
        {**WINDOWED_QWEN, "use_sliding_window": False},
        {**WINDOWED_QWEN, "max_window_layers": 2},
        {**WINDOWED_QWEN, "sliding_window": 128},
        {"sliding_window": 16},
        {**WINDOWED_QWEN, "max_window_layers": None, "use_sliding_window": False},
    ],
)
def test_a_sliding_window_that_cannot_act_is_accepted(change):
    assert ModelConfig.from_hf({**LLAMA, **change}).max_position_embeddings == 128


def test_code_for_anything_but_the_model_is_none_of_ours():
    assert ModelConfig.from_hf({**LLAMA, "auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}}).family == "llama"
