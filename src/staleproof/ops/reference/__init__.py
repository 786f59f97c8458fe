"""The contracts of ``staleproof.ops`` in plain PyTorch: slow, exact, and on any device."""
