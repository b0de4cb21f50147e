"""Faults of vLLM 0.32 on CPUs that a load in place runs into, mended in its workers before a model is loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm import _custom_ops as operations
from vllm.lora.layers import base_linear
from vllm.model_executor.kernels.linear.scaled_mm import cpu
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


def apply() -> None:
    """Mend this process's vLLM; once is enough."""
    _keep_amx_from_fp32()
    _keep_scales_alive()
    _place_adapters_beside_handles()


def after_reload(model: nn.Module) -> None:
    """Make the packed copy anew from which a head is multiplied that shares the embeddings' weight: a reload of the
    embeddings leaves it as it was.
    """
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)


def _keep_amx_from_fp32() -> None:
    """vLLM chooses its AMX kernel by the weight's type alone, which then refuses activations in fp32."""
    fits = cpu.check_cpu_sgl_kernel

    def fits_type_too(rows: int, columns: int, dtype: torch.dtype) -> bool:
        return torch.get_default_dtype() != torch.float32 and fits(rows, columns, dtype)

    cpu.check_cpu_sgl_kernel = fits_type_too


def _keep_scales_alive() -> None:
    """oneDNN's handle of an int8 weight reads the scales where they lay when it was made. A reload copies them
    elsewhere and frees that place, so that weights are multiplied by whatever comes to lie there.
    """
    create = operations.create_onednn_scaled_mm

    def create_with_scales(weight: torch.Tensor, scales: torch.Tensor, *rest: Any) -> Any:
        handle = create(weight, scales, *rest)
        handle.scales = scales
        return handle

    operations.create_onednn_scaled_mm = create_with_scales


def _place_adapters_beside_handles() -> None:
    """vLLM puts adapters where the weight lies, and fails for one that only oneDNN's handle holds, on a CPU."""
    device_of = base_linear._get_lora_device

    def device_of_any(layer: nn.Module) -> torch.device:
        is_behind_handle = getattr(layer, "weight", layer) is None
        return torch.device("cpu") if is_behind_handle else device_of(layer)

    base_linear._get_lora_device = device_of_any
