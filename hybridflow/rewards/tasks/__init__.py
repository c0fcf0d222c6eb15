"""Reward functions of the example tasks, and small patterns for writing one's own."""
