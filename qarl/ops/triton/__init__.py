"""The operations as Triton kernels for GPUs: imported only where Triton is installed, and only `kernels.py`."""
