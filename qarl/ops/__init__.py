"""The operations engine and learner share: torch definitions, CPU kernels, and their gradients."""
