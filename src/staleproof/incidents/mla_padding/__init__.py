"""Incident 1: NaN from the empty rows of MLA decode (vLLM #37442, #57017)."""
