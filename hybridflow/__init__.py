"""Reinforcement learning of language models on Megatron-Core, vLLM and Ray."""
