"""The faulty kernels of the incidents, registered as a user registers a kernel of theirs.

``audit`` may not import ``incidents``; a module of the user's may, and this is one:
``staleproof audit tests/contract/broken_variants.py``. Beside each stands what it breaks (:data:`EXPECTED`).
"""

from __future__ import annotations

import torch

from staleproof import audit, device

device.select("cpu" if not torch.cuda.is_available() else None)

from staleproof.incidents.mla_padding import broken as mla
from staleproof.incidents.moe_routing import broken as moe
from staleproof.incidents.scale_padding import broken as scales
from staleproof.ops.mla.decode import mla_decode

# Subject -> the clauses it breaks. Every other clause that is put to it must hold.
EXPECTED: dict[str, set[str]] = {}


def _expect(name: str, *clauses: str) -> str:
    EXPECTED[name] = set(clauses)
    return name


def _attention(name: str, *clauses: str, q_len: int = 1):
    return audit.attention(layout="mla", q_len=q_len, name=_expect(name, *clauses))


empty_row_not_written = _attention("empty_row_not_written", "E")(mla.empty_row_not_written)
zero_by_zero_written = _attention("zero_by_zero_written", "E", q_len=2)(mla.zero_by_zero_written)
tail = _attention("tail_masked_by_multiplication", "T")(mla.tail_masked_by_multiplication)
# It reads whole pages as well, so it breaks T with the very read that breaks B.
table = _attention("block_table_not_padded", "B", "T")(mla.block_table_not_padded)

_kept: dict[str, torch.Tensor] = {}


def _of_all_calls(name: str, q: torch.Tensor) -> torch.Tensor:
    buffer = _kept.get(name)
    if buffer is None or len(buffer) < len(q) or buffer.ndim != q.ndim:
        _kept[name] = buffer = q.new_zeros(*q.shape[:-1], 512)
    return buffer[: len(q)]


@_attention("one buffer for all calls", "A")
def kept_output(q, kv_cache, block_table, seq_lens, softmax_scale):
    """As ``ZerosOncePerLayer`` and ``OneSharedBuffer``, around a right kernel."""
    out = _of_all_calls("out", q)
    mla_decode(q, kv_cache, block_table, seq_lens, softmax_scale=softmax_scale, out=out)
    return out


@_attention("zeroed once, around a kernel that skips empty rows", "E", "A")
def zeroed_once(q, kv_cache, block_table, seq_lens, softmax_scale):
    """vLLM #37442: an instance attribute of zeros, filled once."""
    out = _of_all_calls("once", q)
    mla.empty_row_not_written(q, kv_cache, block_table, seq_lens, softmax_scale=softmax_scale, out=out)
    return out


def _route(name: str, choice: str, remedy: str, *clauses: str):
    def route(router_logits, top_k, bias=None):
        return moe.route(
            moe.CHOICES[choice], router_logits, top_k, softmax=False, bias=bias, remedy=moe.REMEDIES[remedy]
        )

    return audit.routing(name=_expect(name, *clauses))(route)


warp = _route("warp_keeps_its_first_column", "warp_keeps_its_first_column", "none", "I", "Ib")
block = _route("block_keeps_the_left", "block_keeps_the_left", "none", "I", "Ib")
sort = _route("sort_swaps_raw_nan", "sort_swaps_raw_nan", "none", "I", "Ib")
topk = _route("topk_swaps_raw_nan", "topk_swaps_raw_nan", "none", "I", "Ib")
# What vLLM has since 0.20.0: logits are cured, the bias is not.
clamped = _route("warp, clamped after scoring", "warp_keeps_its_first_column", "clamp_after_scoring", "Ib")

amax_max = audit.rows(name=_expect("quantise_amax_torch_max", "R"))(mla.quantise_amax_torch_max)
amax_fmax = audit.rows(name=_expect("quantise_amax_fmax", "R"))(mla.quantise_amax_fmax)
neighbour = audit.rows(name=_expect("neighbour_in_the_maximum", "R"))(scales.neighbour_in_the_maximum)
alone = audit.rows(name=_expect("row_alone"))(scales.row_alone)


def _quantise(name: str, *clauses: str, per_token: bool, drops_nan: bool):
    def quantise(x):
        return moe.quantise_fp8(x, per_token=per_token, drops_nan=drops_nan)

    return audit.rows(name=_expect(name, *clauses))(quantise)


tensor_keeps = _quantise("quantise_fp8 per tensor, keeps NaN", "R", per_token=False, drops_nan=False)
tensor_drops = _quantise("quantise_fp8 per tensor, drops NaN", "R", per_token=False, drops_nan=True)
token = _quantise("quantise_fp8 per token", per_token=True, drops_nan=False)


@audit.rows(name=_expect("quantize_blocks_only", "W"), skip={"R": "scales lie in tiles of rows"})
def blocks_only(x):
    one = torch.ones(1, device=x.device)
    packed, scale = scales.quantize_blocks_only(x, one, scales.PATHS["128x4"], "empty", lambda fresh: None)
    return packed, scale


@audit.routing(name=_expect("simulate_with_replacement", "0"))
def simulated(router_logits, top_k):
    return scales.simulate_with_replacement(len(router_logits), router_logits.shape[1], top_k)
