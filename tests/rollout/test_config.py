import pytest
from pydantic import ValidationError

from qarl.rollout.config import NativeEngineConfig, SamplingConfig


def test_greedy_sampling_cannot_be_trained():
    assert SamplingConfig(temperature=0.01).temperature == 0.01
    with pytest.raises(ValidationError, match="temperature"):
        SamplingConfig(temperature=0.0)


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p"])
def test_cutting_off_a_part_of_the_distribution_is_refused(key: str):
    with pytest.raises(ValidationError, match=key):
        SamplingConfig.model_validate({key: 1})


def test_a_completion_has_at_least_one_token():
    with pytest.raises(ValidationError, match="max_new_tokens"):
        SamplingConfig(max_new_tokens=0)


@pytest.mark.parametrize(
    "wrong",
    [{"kv_cache": "int4"}, {"kv_bytes": 1000}, {"max_concurrency": 0}, {"prefill_tokens": 0}, {"type": "vllm"}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_an_engine_that_cannot_be_built_is_refused_by_the_keys_name(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        NativeEngineConfig.model_validate(wrong)


@pytest.mark.parametrize("config", [SamplingConfig, NativeEngineConfig])
def test_every_field_is_described(config):
    assert [name for name, field in config.model_fields.items() if name != "type" and not field.description] == []
