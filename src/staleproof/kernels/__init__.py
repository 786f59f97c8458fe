"""Adapters that call the real kernels of packages, one module a package."""
