"""Patches of an installed vLLM, one module an incident."""
