"""Incident 5: what the revert blamed, and what it was (vLLM #38359, #38148, #39444, #40047)."""
