"""MLA decode: its kernels, the plan that chooses among them, and the public function in ``decode``."""

__all__ = ["decode"]
