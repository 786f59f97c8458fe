"""Incident 3: NaN router logits pick one expert k times (vLLM #39593, fixed by #39391)."""
