"""Incident 6: bytes behind the MXFP4 scales of gpt-oss decide its answers on Hopper."""
