"""The faults of vLLM that are mended are still there, and mended."""

import gc

import pytest
import torch

pytest.importorskip("vllm")

from vllm import _custom_ops as operations
from vllm.lora.layers import base_linear
from vllm.model_executor.kernels.linear.scaled_mm import cpu

from qarl.rollout.vllm import repairs

pytestmark = pytest.mark.vllm


def test_a_handle_keeps_the_scales_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "create_onednn_scaled_mm", operations.create_onednn_scaled_mm)
    monkeypatch.setattr(cpu, "check_cpu_sgl_kernel", cpu.check_cpu_sgl_kernel)
    monkeypatch.setattr(base_linear, "_get_lora_device", base_linear._get_lora_device)
    repairs.apply()
    codes, scales = torch.ones(64, 64, dtype=torch.int8).t(), torch.full((64, 1), 0.5)
    handle = operations.create_onednn_scaled_mm(codes, scales, torch.float32, True, False, 32)
    del scales
    gc.collect()
    others = [torch.full((64, 1), float("nan")) for _ in range(1000)]  # would take its place
    rows, row_scales, _ = operations.onednn_scaled_int8_quant(torch.eye(64), None, None, True)
    out = torch.empty(64, 64)
    operations.onednn_scaled_mm(handle, rows, out, row_scales, None, None, None)
    torch.testing.assert_close(out, torch.full((64, 64), 0.5))
    assert len(others) == 1000


def test_fp32_activations_are_kept_from_the_amx_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "create_onednn_scaled_mm", operations.create_onednn_scaled_mm)
    monkeypatch.setattr(cpu, "check_cpu_sgl_kernel", lambda *_: True)
    monkeypatch.setattr(base_linear, "_get_lora_device", base_linear._get_lora_device)
    repairs.apply()
    assert not cpu.check_cpu_sgl_kernel(64, 64, torch.int8)
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.bfloat16)
    assert cpu.check_cpu_sgl_kernel(64, 64, torch.int8)


def test_adapters_of_a_weight_behind_a_handle_have_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "create_onednn_scaled_mm", operations.create_onednn_scaled_mm)
    monkeypatch.setattr(cpu, "check_cpu_sgl_kernel", cpu.check_cpu_sgl_kernel)
    monkeypatch.setattr(base_linear, "_get_lora_device", base_linear._get_lora_device)
    behind_handle, held = torch.nn.Module(), torch.nn.Linear(2, 2, device="meta")
    behind_handle.register_parameter("weight", None)
    with pytest.raises(AttributeError):
        base_linear._get_lora_device(behind_handle)
    repairs.apply()
    assert base_linear._get_lora_device(behind_handle) == torch.device("cpu")
    assert base_linear._get_lora_device(held) == torch.device("meta")
