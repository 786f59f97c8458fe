"""Incident 5: what the revert blamed, and the real causes (vLLM #38359, #38148, #39444, #40047)."""
