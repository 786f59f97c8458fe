"""Adapters: what calls the real kernels of packages, one module a package."""
