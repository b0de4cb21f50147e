import pytest
from pydantic import ValidationError

from qarl.rollout.config import NativeEngineConfig, SamplingConfig, VllmEngineConfig


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


@pytest.mark.parametrize(
    "wrong",
    [{"dtype": "int8"}, {"kv_bytes": 1000}, {"max_concurrency": 0}, {"tensor_parallel": 0}, {"kv_cache": "int8"}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_so_is_a_vllm_that_cannot_be_started(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        VllmEngineConfig.model_validate(wrong)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"transport": "disk"}, "transport = 'disk' with folder = '': set a folder for 'disk', and only then"),
        ({"folder": "/data"}, "transport = 'memory' with folder = '/data'"),
        ({"transport": "gloo", "folder": "/data"}, "transport = 'gloo' with folder = '/data'"),
        ({"transport": "ucx"}, "Input should be 'memory', 'disk', 'gloo' or 'nccl'"),
        ({"timeout_s": 0.0}, "greater than 0"),
        ({"urls": ("http://a:1", "http://b:1", "http://a:1")}, "urls names a server twice"),
        ({"start_timeout_s": 0.0}, "greater than 0"),
        ({"urls": ("http://a:1",), "start_timeout_s": 9.0}, "start_timeout_s = 9 says nothing with urls"),
        ({"urls": ("http://a:1", "http://a:1/")}, "urls names a server twice"),
    ],
)
def test_a_way_to_vllm_that_is_none_is_refused(table, message: str):
    with pytest.raises(ValidationError, match=message):
        VllmEngineConfig.model_validate(table)


def test_a_slash_at_the_end_of_a_url_is_no_other_server():
    assert VllmEngineConfig(urls=("http://a:1/", "http://b:1//")).urls == ("http://a:1", "http://b:1")


@pytest.mark.parametrize("config", [SamplingConfig, NativeEngineConfig, VllmEngineConfig])
def test_every_field_is_described(config):
    assert [name for name, field in config.model_fields.items() if name != "type" and not field.description] == []
