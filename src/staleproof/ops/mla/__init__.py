"""MLA decode. ``README.md`` says which kernel runs when, and why.

- ``decode``: the public function and the portable Triton kernel.
- ``plan``: the choice of a kernel and of its cuts, from shapes alone.
- ``hopper``: Hopper; a program decodes whole requests, a split of one request, or an equal part of all keys.
- ``e4m3``: Hopper with an E4M3 cache, up to 32 rows a program.
- ``queries``, ``merge``: the launches before and after those. ``hopper_call``: all three in one call.
"""

__all__ = ["decode"]
