"""What a person sees of a run: its folder, metrics, console, curves and sampled rollouts."""
