"""Sampling with vLLM, in a process of its own."""
