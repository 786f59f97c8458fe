"""Incident 7: a prefix-cache hit on keys and values that nobody wrote (vLLM #43569)."""
