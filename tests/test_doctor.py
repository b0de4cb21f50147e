"""What the doctor says about this machine, and about machines that lack something."""

import json

import pytest
import torch

from qarl import doctor
from qarl.doctor import PACKAGES, Kernel, examine, gpu_kernels, installed, scheme_kernels
from qarl.ops.kernels import kernels, using
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


def test_schemes_whose_codes_take_more_memory_than_they_say_tell_so() -> None:
    found = {name: kernel for name, kernel in scheme_kernels().items() if name.startswith(("w4a16", "w3", "w2"))}
    assert {kernel.state for kernel in found.values()} == {"emulated"}
    if kernels().exact_matmul:
        assert {name for name, kernel in found.items() if "(of 4 bits in memory)" in kernel.how} == {
            "w3a16", "w3a16-g32", "w2a16", "w2a16-g32",
        }  # fmt: skip
        assert "(in memory as fp32 too)" in found["w4a16-g16"].how


def test_gpu_kernels_are_real_interpreted_or_absent_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability[0])
    missing: list[str | None] = [None]
    monkeypatch.setattr(doctor, "missing_for_cuda", lambda: missing[0])
    monkeypatch.setattr(doctor, "has_triton", lambda: True)
    emulated = {"w4a16-g16", "w3a16", "w3a16-g32", "w2a16", "w2a16-g32"}
    assert {name for name, kernel in gpu_kernels().items() if kernel.state != "real"} == emulated
    assert gpu_kernels()["w12a12-int12"].how == "Triton, exact integer GEMM, three products of bytes"
    capability[0] = (8, 0)
    assert {name for name, kernel in gpu_kernels().items() if kernel.state != "real"} == emulated | {
        "fp8",
        "fp8-block",
    }
    missing[0] = "torch sees no GPU"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert {kernel.state for name, kernel in gpu_kernels().items() if name not in emulated} == {"interpreted"}
    monkeypatch.delenv("TRITON_INTERPRET")
    assert gpu_kernels()["none"] == Kernel("absent", "torch sees no GPU")
    assert set(gpu_kernels()) == set(SCHEMES)


def test_a_package_that_is_absent_says_how_to_get_it() -> None:
    assert installed("qarl-no-such-package", "data") == "absent: pip install 'qarl-llm[data]'"
    assert installed("qarl-no-such-package", "core") == "absent: pip install qarl-llm"
