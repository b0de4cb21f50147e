"""The two ways a run can end badly; everything else that escapes is a bug of ours."""


class ConfigurationError(ValueError):
    """Something the user asked for cannot be done: says what, where, the rule and the remedy. Exit code 2."""


class RunError(RuntimeError):
    """A run that began cannot go on, or stopped itself: says why and what was saved. Exit code 1."""
