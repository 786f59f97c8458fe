"""Incident 4: KV blocks that were Mamba state (vLLM #35138, #35219)."""
