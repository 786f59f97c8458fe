"""Incident 2: the out-of-memory that the first fix caused (vLLM #37442, #37777, #37799)."""
