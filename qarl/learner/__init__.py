"""The learner: rollouts and advantages in, new master weights out."""
