"""Decoder models: their configurations, the one forward for engine and learner, and checkpoints in and out."""
