"""Incident 2: the out-of-memory that the first fix caused (vLLM #37442, #37777, #37799)."""

from staleproof.decode_buffer.reference import DecodeWorkspace, WorkspaceLocked

__all__ = ["DecodeWorkspace", "WorkspaceLocked"]
