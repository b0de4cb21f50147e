"""From learner to engine: weights published once a version, checked on arrival."""
