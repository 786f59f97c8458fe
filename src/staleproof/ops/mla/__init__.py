"""MLA decode. ``workbook/mla-decode.md`` says which kernel runs when, and why.

- ``decode``: the public function and the portable Triton kernel.
- ``plan``: the choice of a kernel and of its cuts, from shapes alone.
- ``hopper``: Hopper, a program for whole requests, a split of one, or an equal part of all.
- ``e4m3``: Hopper beside an E4M3 cache, up to 32 rows a program.
- ``queries``, ``merge``: the launches before and after those. ``hopper_call``: a call of all three.
"""

__all__ = ["decode"]
