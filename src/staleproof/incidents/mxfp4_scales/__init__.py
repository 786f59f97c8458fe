"""Incident 6: bytes after the MXFP4 scales of gpt-oss change its answers on Hopper."""
