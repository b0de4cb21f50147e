"""Which pattern decides a name, and what is said of patterns that decide none."""

import pytest

from qarl.errors import ConfigurationError
from qarl.patterns import deciding, family

NAMES = ["layers.0.q_proj", "layers.1.q_proj", "layers.1.k_proj", "head"]


def test_the_last_match_decides_and_a_name_may_have_none() -> None:
    assert deciding(NAMES, ["layers.*", "*.1.*"], "[table]", "module") == {
        "layers.0.q_proj": "layers.*",
        "layers.1.q_proj": "*.1.*",
        "layers.1.k_proj": "*.1.*",
        "head": None,
    }


def test_a_pattern_that_matches_nothing_is_refused_with_near_names() -> None:
    with pytest.raises(
        ConfigurationError, match=r'^\[table\] "\*\.q_prj" matches no module; they are named like layers\.\*\.q_proj, '
    ):
        deciding(NAMES, ["*.q_prj"], "[table]", "module")


def test_a_pattern_that_later_ones_make_idle_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r'^\[table\] "head" has no effect: later ones, such as "\*", decide every module'
    ):
        deciding(NAMES, ["head", "*"], "[table]", "module")


def test_a_family_has_no_numbers_of_its_own() -> None:
    assert family("model.layers.12.experts.3.w1.weight") == "model.layers.*.experts.*.w1.weight"
    assert family("layers.7") == "layers.*"
