"""Engines: prompts in, completions with the log-probabilities they were sampled with out."""
