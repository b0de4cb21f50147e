"""The operations as Triton kernels for GPUs. Only `kernels.py` is used from outside, and only where Triton is installed."""
