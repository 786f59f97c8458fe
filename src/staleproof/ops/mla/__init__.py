"""MLA decode. ``workbook/mla-decode.md`` says which kernel runs when, and why.

- ``decode``: the public function and the portable Triton kernel.
- ``plan``: the choice of a kernel and of its cuts, from shapes alone.
- ``sm90``: Hopper, a program for each request.
- ``hopper``: Hopper, a program for each request, split of one, or equal part of all; up to 16 heads, or 64.
- ``e4m3``: Hopper beside an E4M3 cache, up to 32 rows a program.
- ``queries``, ``merge``: the launches before and after those. ``hopper_call``: a call of all three.
"""

__all__ = ["decode"]
