import math

import pytest
import torch

from qarl.errors import ConfigurationError
from qarl.models.rope import RopeConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hf(**keys):
    return {"max_position_embeddings": 4096, **keys}


def read(**keys):
    return RopeConfig.from_hf(hf(**keys), "config.json")


def test_version_4_and_version_5_keys_say_the_same():
    old = read(rope_theta=5e5, rope_scaling=LLAMA3)
    new = read(rope_parameters={**LLAMA3, "rope_theta": 5e5})
    assert old == new
    assert (old.type, old.theta, old.original_max_position) == ("llama3", 5e5, 8192)


def test_the_oldest_spelling_of_the_type_is_read():
    assert read(rope_scaling={"type": "linear", "factor": 2.0}) == RopeConfig("linear", 10_000.0, 2.0)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(),
        RopeConfig("linear", 5e4, 2.0),
        RopeConfig("llama3", 5e5, 8.0, 8192, 1.0, 4.0),
        RopeConfig("yarn", 1e6, 4.0, 32768, attention_factor=1.1),
        RopeConfig("yarn", 1e6, 4.0, 32768, mscale=1.0, mscale_all_dim=0.5, truncate=False),
    ],
)
def test_what_is_written_is_what_is_read(rope):
    assert read(rope_parameters=rope.to_hf()) == rope


def test_default_frequencies_are_powers_of_theta():
    frequencies = RopeConfig(theta=10_000.0).inverse_frequencies(8)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1, 0.01, 0.001]))


def test_linear_scaling_divides_every_frequency():
    plain = RopeConfig().inverse_frequencies(8)
    assert torch.equal(RopeConfig("linear", factor=4.0).inverse_frequencies(8), plain / 4)


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    rope = RopeConfig("llama3", 5e5, 8.0, 8192, 1.0, 4.0)
    plain = RopeConfig(theta=5e5).inverse_frequencies(64)
    stretched = rope.inverse_frequencies(64)
    wavelengths = 2 * math.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    assert short.any()
    assert long.any()
    assert torch.equal(stretched[short], plain[short])
    assert torch.equal(stretched[long], plain[long] / 8)
    between = ~short & ~long
    assert ((stretched[between] < plain[between]) & (stretched[between] > plain[between] / 8)).all()


def test_yarn_scales_the_tables_by_its_attention_factor():
    assert RopeConfig("yarn", factor=4.0, original_max_position=64).table_scale() == 0.1 * math.log(4) + 1
    assert RopeConfig("yarn", factor=4.0, attention_factor=1.5).table_scale() == 1.5
    assert RopeConfig("linear", factor=4.0).table_scale() == 1.0


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "longrope"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 3]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1.0}}, "factor"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": "8k"}}, "original_max_position"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(keys, named):
    with pytest.raises(ConfigurationError, match=rf"^config\.json: .*{named}"):
        read(**keys)
