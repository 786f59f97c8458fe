"""The padding contract, probed on anybody's kernels: ``staleproof audit`` and ``pytest --padding-contract``.

A kernel is registered by a decorator of its kind, which leaves it as it is::

    from staleproof import audit

    @audit.attention(layout="paged", heads=8, kv_heads=2, head_dim=64, page_size=16)
    def my_decode(q, k_cache, v_cache, block_table, seq_lens, out, softmax_scale): ...

It is called with the arguments that it names, from these:

- ``attention``: q (tokens, heads, head_dim), block_table, seq_lens, query_start_loc, out, lse,
  softmax_scale, max_seq_len, max_q_len, page_size; layout ``paged``: k_cache and v_cache (pages,
  page_size, kv_heads, head_dim); ``mla``: kv_cache (pages, page_size, 576) and kv_lora_rank;
  ``gathered``: q, k, v (batch, heads, tokens, head_dim) and mask. It returns out, or out and lse. With
  ``q_len=0`` a request has any number of query tokens, by query_start_loc; with ``q_len=n`` up to n, and
  q is then (batch, q_len, heads, head_dim).
- ``routing``: router_logits (rows, experts), top_k, bias, is_padding; returns weights and ids.
- ``rows``: x (rows, hidden); returns a tensor or several, e.g. values and scales.
- ``ragged``: x (rows, hidden), starts (sequences + 1,).
- ``experts``: x, w1, w2, topk_weights, topk_ids.
- ``kv_write``: key, value (tokens, kv_heads, head_dim), k_cache, v_cache, slot_mapping; in place.
- ``state``: x (rows, dim), state (slots, dim, width - 1), weight (dim, width), state_indices.
- ``merge``: out_a, lse_a, out_b, lse_b; returns out, or out and lse.
- ``operands``: what ``make=`` of the device returns, a dict; for any other kernel. Asked 0 and O.

``value_dim`` is ``head_dim`` unless it is given. ``prepared=True``: the function returns one that launches;
``planned=True``: that one holds for the lengths only that it was made with. ``given={"backend": "fa2"}``
passes further arguments, so that decorators above each other make several kernels of one function.

Clause 0 compares results with what is right. Where the probe cannot know it, say so:

- ``reference=`` of ``rows`` and ``ragged`` takes x in float64 on the CPU, and starts, and returns what the
  kernel should, every result of it; of ``operands`` it takes what the kernel takes; of ``routing``
  router_logits and top_k, and returns weights and ids. A quantiser that returns fp8 or int8 values and
  scales needs none: values times scales are x.
- ``inverse=`` of ``rows`` takes the results of a quantiser and returns x, for packed formats.

Without them clause 0 is ``not run``: "not checked, no reference".
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from staleproof.check import fail, require
from staleproof.kernels import subject

__all__ = ["attention", "experts", "kv_write", "merge", "operands", "ragged", "routing", "rows", "state"]


def _are_texts(value: object) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(one, str) for one in value)


def _by_name(value: object) -> bool:
    return isinstance(value, Mapping) and _are_texts([*value])


def _by_clause(value: object) -> bool:
    return isinstance(value, Mapping) and _are_texts([*value, *value.values()])


# Argument of every decorator -> whether a value fits, and what is expected.
_ARGUMENTS: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("name", "package", "needs"), (lambda value: isinstance(value, str), "a text")),
    **dict.fromkeys(("versions", "files"), (_are_texts, "a tuple of texts")),
    **dict.fromkeys(("documented", "skip"), (_by_clause, 'a text for each clause, such as {"R": "why"}')),
    "given": (_by_name, 'arguments by name, such as {"backend": "fa2"}'),
}


def _checked(kind: str) -> Callable[..., Any]:
    """The decorator of a kind; it says which of its arguments is of a wrong type."""
    decorator = getattr(subject, kind)

    @functools.wraps(decorator)
    def register(*functions: object, **arguments: Any) -> Callable[[Any], Any]:
        require(not functions, kind, f"@audit.{kind}(), with parentheses", f"@audit.{kind}")
        for name, (fits, expected) in _ARGUMENTS.items():
            if (value := arguments.get(name)) is not None:
                require(fits(value), name, expected, repr(value))
        mark = decorator(**arguments)

        def checked(function: Any) -> Any:
            if given := arguments.get("given"):
                try:
                    inspect.signature(function).bind_partial(**given)
                except TypeError:
                    fail("given", f"arguments of {function.__name__}", ", ".join(given))
            return mark(function)

        return checked

    return register


attention, merge, routing, rows, ragged, experts, kv_write, state, operands = map(_checked, subject.KINDS)
