"""Loaded by vLLM in its worker: int8 products by oneDNN, which takes fp32 activations, also where there is AMX."""

from vllm.model_executor.kernels.linear.scaled_mm import cpu

cpu.check_cpu_sgl_kernel = lambda *_: False


class WithoutAmx:
    """vLLM asks for a class."""
