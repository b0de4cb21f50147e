"""What the doctor says about this machine, and about machines that lack something."""

import json

import torch

from qarl.doctor import PACKAGES, Kernel, examine, installed, scheme_kernels
from qarl.ops.kernels import using
from qarl.ops.reference import ReferenceKernels
from qarl.quant import SCHEMES


def test_the_examination_is_json_and_names_every_scheme_and_package() -> None:
    found = json.loads(json.dumps(examine()))
    assert set(found["kernels"]) == set(SCHEMES)
    assert set(found["packages"]) == set(PACKAGES)
    assert found["packages"]["torch"] == torch.__version__
    assert isinstance(found["integer_gemm_exact"], bool)


def test_without_c_kernels_every_scheme_is_emulated() -> None:
    with using(ReferenceKernels()):
        found = scheme_kernels()
    assert {kernel.state for kernel in found.values()} == {"emulated"}
    assert found["none"] == Kernel("emulated", "torch reference operations (no C kernels)")


def test_a_package_that_is_absent_says_how_to_get_it() -> None:
    assert installed("qarl-no-such-package", "data") == "absent: pip install 'qarl-llm[data]'"
    assert installed("qarl-no-such-package", "core") == "absent: pip install qarl-llm"
