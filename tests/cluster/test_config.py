import pytest
from pydantic import ValidationError

from qarl.cluster.config import ClusterConfig


@pytest.mark.parametrize(
    "key",
    ['ray_address = "auto"', "engine_cpus = 2", "engine_gpus = 0.5", "restarts = 1"],
    ids=lambda key: key.split()[0],
)
def test_what_would_say_nothing_without_engines_is_refused(key: str) -> None:
    name, value = key.split(" = ")
    settings = {name: eval(value)}
    with pytest.raises(ValidationError, match=f"{name} says nothing with engines = 0"):
        ClusterConfig.model_validate(settings)
    assert ClusterConfig.model_validate({"engines": 1, **settings})


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "10.0.0.1", "http://a:1", "a b:1"])
def test_what_is_no_address_of_a_cluster_is_refused(address: str) -> None:
    with pytest.raises(ValidationError, match="is neither host:port nor 'auto'"):
        ClusterConfig(engines=1, ray_address=address)


@pytest.mark.parametrize("address", ["", "auto", "head:6379", "[::1]:6379"])
def test_addresses(address: str) -> None:
    assert ClusterConfig(engines=1, ray_address=address).ray_address == address


@pytest.mark.parametrize(
    "wrong", [{"engines": -1}, {"engine_cpus": 0}, {"timeout_s": 0.0}, {"timeout_s": 1e9}, {"restarts": -1}]
)
def test_values_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        ClusterConfig.model_validate({"engines": 1, **wrong})


def test_every_field_is_described() -> None:
    assert [name for name, field in ClusterConfig.model_fields.items() if not field.description] == []
