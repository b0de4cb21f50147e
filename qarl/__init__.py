"""qarl: reinforcement learning of language models with low-bit rollouts, trained exactly as served."""

__version__ = "0.1.0"
