import pytest
import torch
from pydantic import ValidationError

from qarl.errors import ConfigurationError
from qarl.quant.rules import QuantConfig, plan_schemes
from qarl.quant.scheme import SCHEMES

W8A8 = SCHEMES["w8a8-int8"]


def llama(layers: int = 2) -> list[tuple[str, tuple[int, int]]]:
    modules: list[tuple[str, tuple[int, int]]] = []
    for layer in range(layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        modules += [(f"{attention}.q_proj", (256, 256)), (f"{attention}.k_proj", (128, 256))]
        modules += [(f"{attention}.v_proj", (128, 256)), (f"{attention}.o_proj", (256, 256))]
        modules += [(f"{mlp}.gate_proj", (512, 256)), (f"{mlp}.up_proj", (512, 256)), (f"{mlp}.down_proj", (256, 512))]
    return [*modules, ("lm_head", (1000, 256))]


@pytest.mark.parametrize(
    ("scheme", "head"),
    [
        ("w8a8-int8", "w12a12-int12"),
        ("w4a8-int8", "w12a12-int12"),
        ("w4a16", "none"),
        ("fp8", "none"),
        ("none", "none"),
    ],
)
def test_the_head_of_integer_schemes_is_16_bit_and_of_others_full_precision(scheme: str, head: str) -> None:
    assert plan_schemes(llama(), SCHEMES[scheme], QuantConfig()).choices["lm_head"].scheme.name == head


def test_projections_get_the_runs_scheme() -> None:
    plan = plan_schemes(llama(), W8A8, QuantConfig())
    assert sum(scheme is W8A8 for scheme in plan.quantized.values()) == 14
    assert plan.choices["model.layers.1.mlp.down_proj"].scheme is W8A8


def test_the_last_matching_rule_counts() -> None:
    rules = {"*.down_proj": "none", "*.layers.1.mlp.down_proj": "w4a8-int8", "lm_head": "w8a8-int8"}
    plan = plan_schemes(llama(), W8A8, QuantConfig(rules=rules))
    assert plan.choices["model.layers.0.mlp.down_proj"].scheme.name == "none"
    assert plan.choices["model.layers.1.mlp.down_proj"].scheme.name == "w4a8-int8"
    assert plan.choices["lm_head"].scheme.name == "w8a8-int8"


def test_a_rule_that_matches_nothing_is_refused_with_near_names() -> None:
    with pytest.raises(ConfigurationError, match=r'"\*\.dwn_proj" matches no linear module.*down_proj'):
        plan_schemes(llama(), W8A8, QuantConfig(rules={"*.dwn_proj": "none"}))


def test_a_rule_that_later_rules_make_idle_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r'"\*\.0\.mlp\.down_proj" has no effect.*"\*\.down_proj"'):
        plan_schemes(llama(), W8A8, QuantConfig(rules={"*.0.mlp.down_proj": "none", "*.down_proj": "fp8"}))


@pytest.mark.parametrize(
    ("pattern", "named"),
    [("*.q_proj", r"q_proj.*k_proj"), ("*.v_proj", r"v_proj"), ("*.up_proj", r"gate_proj.*up_pro")],
)
def test_fused_siblings_must_share_a_scheme(pattern: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named) as refused:
        plan_schemes(llama(), W8A8, QuantConfig(rules={pattern: "none"}))
    assert "model.layers.0." in str(refused.value)
    assert f'rule "{pattern}"' in str(refused.value)


def test_siblings_may_be_excepted_together_and_layers_may_differ() -> None:
    plan = plan_schemes(llama(), W8A8, QuantConfig(rules={"*.0.self_attn.[qkv]_proj": "none"}))
    assert len(plan.quantized) == 12


def test_the_experts_of_a_layer_are_siblings() -> None:
    experts = [
        (f"model.layers.0.mlp.experts.{e}.{leaf}", (64, 64)) for e in range(3) for leaf in ("gate_proj", "up_proj")
    ]
    with pytest.raises(ConfigurationError, match=r"experts\.0\..*experts\.1\."):
        plan_schemes(experts, W8A8, QuantConfig(rules={"*.experts.1.*": "none"}))


def test_a_matrix_without_whole_groups_is_refused_by_name_unless_excepted() -> None:
    modules = [("model.layers.0.self_attn.o_proj", (576, 520)), ("model.layers.0.mlp.down_proj", (576, 1536))]
    with pytest.raises(ConfigurationError, match=r"self_attn\.o_proj: in_features 520"):
        plan_schemes(modules, SCHEMES["w4a16"], QuantConfig())
    plan = plan_schemes(modules, SCHEMES["w4a16"], QuantConfig(rules={"*.o_proj": "none"}))
    assert list(plan.quantized) == ["model.layers.0.mlp.down_proj"]


def test_a_width_without_whole_groups_of_128_gets_the_largest_smaller_group_and_the_account_says_so() -> None:
    modules = [("layers.0.o_proj", (576, 576)), ("layers.0.down_proj", (576, 1536)), ("layers.0.q_proj", (96, 96))]
    plan = plan_schemes(modules, SCHEMES["w4a16"], QuantConfig())
    names = [scheme.name for scheme in plan.quantized.values()]
    assert names == ["w4a16-g64", "w4a16", "w4a16-g32"]
    assert "576 inputs are no multiple of 128, so in smaller groups" in plan.describe()


def test_an_unknown_scheme_in_a_rule_is_refused_when_the_recipe_is_read() -> None:
    with pytest.raises(ValidationError, match="unknown scheme 'int3'"):
        QuantConfig(rules={"*.down_proj": "int3"})


def test_the_account_adds_up() -> None:
    plan = plan_schemes(llama(layers=2), W8A8, QuantConfig(rules={"*.down_proj": "none", "lm_head": "none"}))
    lines = plan.describe().splitlines()
    # A layer: q, o 65536 each; k, v 32768 each; gate, up, down 131072 each. Head: 256000.
    quantized = 2 * (2 * 65536 + 2 * 32768 + 2 * 131072)
    total = quantized + 2 * 131072 + 256000
    after = quantized + 2 * 4 * (256 + 256 + 128 + 128 + 512 + 512) + 4 * (total - quantized)
    assert lines[0] == (
        f"quantized 12 of 15 matrices, {quantized / 1e6:.1f} of {total / 1e6:.1f} M parameters; "
        f"{4 * total / 1e6:.1f} MB as fp32, {after / 1e6:.1f} MB as planned"
    )
    assert "  w8a8-int8       2 x model.layers.*.self_attn.q_proj [256, 256]: the run's scheme" in lines
    assert '  none            2 x model.layers.*.mlp.down_proj [256, 512]: rule "*.down_proj"' in lines
    assert '  none            1 x lm_head [1000, 256]: rule "lm_head"' in lines


def test_with_other_scales_modules_go_on_sharing_their_scheme() -> None:
    rules = {"*.layers.1.*": "w4a16-g64", "*.down_proj": "fp8"}
    before = plan_schemes(llama(), SCHEMES["w4a16"], QuantConfig(rules=rules))
    plan = before.with_scales_in(torch.bfloat16)
    # Siblings are fused by the identity of their scheme.
    for layer in (0, 1):
        parts = [
            plan.choices[f"model.layers.{layer}.self_attn.{leaf}"].scheme for leaf in ("q_proj", "k_proj", "v_proj")
        ]
        assert all(part is parts[0] for part in parts)
        assert parts[0].weight is not None and parts[0].weight.scale_dtype == torch.bfloat16
    assert len({id(scheme) for scheme in plan.quantized.values()}) == 3
    assert plan.choices["model.layers.0.mlp.down_proj"].scheme is SCHEMES["fp8"]
    assert plan.choices["lm_head"] == before.choices["lm_head"]
    assert plan.describe() == before.describe()
    assert all(SCHEMES[name].weight.scale_dtype == torch.float32 for name in ("w4a16", "w4a16-g64"))  # type: ignore[union-attr]
