"""What a call that was made before must have in common with this one, to be repeated without checks.

On a GPU the first call of each layout keeps its compiled kernels, and later ones only fill in addresses. Here
a stand-in is kept instead, so that a CPU shows which calls it would serve.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from staleproof.ops import clear_empty_rows, distinct_experts, fp8, nvfp4, topk
from staleproof.ops.launching import Seen
from staleproof.ops.mla import decode

Arguments = dict[str, Any]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _mla(**change: Any) -> Arguments:
    given = {
        "q": torch.ones(2, 4, 96),
        "kv_cache": torch.ones(6, 16, 96),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "seq_lens": ints(3, 20),
        "softmax_scale": 0.1,
        "kv_lora_rank": 64,
        "num_kv_splits": 1,
    }
    return given | change


def _clear(**change: Any) -> Arguments:
    return {"out": torch.ones(4, 2, 8), "seq_lens": ints(1, 0, 2, 0)} | change


def _fp8(**change: Any) -> Arguments:
    return {"x": torch.ones(6, 40)} | change


def _route(**change: Any) -> Arguments:
    return {"router_logits": torch.ones(5, 16), "top_k": 4} | change


def _groups(**change: Any) -> Arguments:
    return _route(num_expert_group=4, topk_group=2) | change


def _fp4(**change: Any) -> Arguments:
    return {"x": torch.ones(4, 64), "global_scale": torch.ones(1)} | change


def _ids(**change: Any) -> Arguments:
    return {"topk_ids": torch.zeros(5, 3, dtype=torch.int32), "topk_weights": torch.ones(5, 3)} | change


PADDING = torch.zeros(5, dtype=torch.bool)
# Function, arguments, and changes of them that another kernel or another grid serves.
OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Arguments], list[Arguments]]] = {
    "mla_decode": (
        decode.mla_decode,
        _mla,
        [
            {"softmax_scale": 0.2},
            {"kv_lora_rank": 32, "q": torch.ones(2, 4, 64), "kv_cache": torch.ones(6, 16, 64)},
            {"k_scale": 0.5},
            {"num_kv_splits": 2},
            {"num_kv_splits": None},
            {"out": torch.ones(2, 4, 64)},
            {"lse": torch.ones(2, 4)},
            {"q": torch.ones(2, 3, 96)},
            {"q": torch.ones(2, 1, 4, 96)},
            {"kv_cache": torch.ones(6, 32, 96)},
            {"kv_cache": torch.ones(6, 16, 96).to(torch.float8_e4m3fn)},
            {"block_table": torch.zeros(2, 3, dtype=torch.int32)},
            {"block_table": torch.zeros(2, 9, dtype=torch.int32)[:, :2]},
        ],
    ),
    "clear_empty_rows": (
        clear_empty_rows.clear_empty_rows,
        _clear,
        [
            {"out": torch.ones(4, 2, 8).half()},
            {"out": torch.ones(4, 1, 2, 8)},
            {"out": torch.ones(4, 3, 8)[:, :2]},
            {"lse": torch.ones(4, 2)},
            {"seq_lens": ints(1, 0), "out": torch.ones(2, 2, 8)},
            {"query_start_loc": ints(0, 1, 2, 3, 4)},
        ],
    ),
    "quantize_fp8_per_tensor": (
        fp8.quantize_fp8_per_tensor,
        _fp8,
        [
            {"live_rows": 3},
            {"live_rows": ints(3)},
            {"live_rows": torch.zeros(6, dtype=torch.bool)},
            {"is_padding": torch.zeros(6, dtype=torch.bool)},
            {"saturate_nan": True},
            {"x": torch.ones(6, 41)},
            {"x": torch.ones(6, 80)[:, :40]},
            {"x": torch.ones(6, 40).bfloat16()},
            {"out": (torch.ones(6, 40).to(torch.float8_e4m3fn), torch.ones(1))},
        ],
    ),
    "topk_softmax": (
        topk.topk_softmax,
        _route,
        [
            {"top_k": 3},
            {"bias": torch.ones(16)},
            {"renormalize": True},
            {"routed_scaling_factor": 2.5},
            {"is_padding": PADDING},
            {"topk_ids_dtype": torch.int64},
            {"router_logits": torch.ones(5, 16).half()},
            {"router_logits": torch.ones(5, 24)[:, :16]},
            {"router_logits": torch.ones(6, 16)},
            {"out": (torch.ones(5, 4), torch.zeros(5, 4, dtype=torch.int32))},
        ],
    ),
    "topk_softmax, padding": (
        topk.topk_softmax,
        lambda **change: _route(is_padding=PADDING) | change,
        [{"padding_id": 7}, {"is_padding": None}],
    ),
    "grouped_topk": (
        topk.grouped_topk,
        _groups,
        [
            {"num_expert_group": 2},
            {"topk_group": 3},
            {"renormalize": False},
            {"routed_scaling_factor": 2.5},
            {"bias": torch.ones(16)},
            {"top_k": 2},
        ],
    ),
    "quantize_nvfp4": (
        nvfp4.quantize_nvfp4,
        _fp4,
        [
            {"swizzled": False},
            {"x": torch.ones(4, 64).half()},
            {"x": torch.ones(4, 128)[:, :64]},
            {"out": (torch.zeros(4, 32, dtype=torch.uint8), torch.ones(128, 4).to(torch.float8_e4m3fn))},
        ],
    ),
    "distinct_experts": (
        distinct_experts.distinct_experts,
        _ids,
        [
            {"topk_ids": torch.zeros(5, 3, dtype=torch.int64)},
            {"topk_weights": torch.ones(5, 3).half()},
            {"topk_ids": torch.zeros(4, 3, dtype=torch.int32), "topk_weights": torch.ones(4, 3)},
        ],
    ),
}
# Of these the kernel reads the contents at each call, and their layout is fixed.
READ_ANEW = {"seq_lens", "global_scale"}
CHANGES = [(name, i) for name, (*_, changes) in OPERATIONS.items() for i in range(len(changes))]


class Kept(Seen[Any]):
    """Keeps a stand-in where nothing was compiled, and counts the calls that it served."""

    def __init__(self, is_fp8: bool) -> None:
        super().__init__()
        self.served = 0
        self.addresses: list[object] = []
        self._is_fp8 = is_fp8

    def _serve(self, *addresses: object) -> None:
        self.served += 1
        self.addresses = [*addresses]

    def keep(self, key: Any, call: Any) -> None:
        super().keep(key, call or ((None, self._serve, 1) if self._is_fp8 else self._serve))


@pytest.fixture(name="kept")
def kept_fixture(device: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Kept]:
    if device != "cpu":
        pytest.skip("on a GPU calls are kept in earnest: test_launching.py")

    def of(call: Callable[..., Any]) -> Kept:
        kept = Kept(call is fp8.quantize_fp8_per_tensor)
        monkeypatch.setattr(sys.modules[call.__module__], "_SEEN", kept)
        return kept

    return of


@pytest.mark.parametrize(("name", "which"), CHANGES)
def test_another_layout_or_option_is_another_call(kept, name: str, which: int) -> None:
    call, arguments, changes = OPERATIONS[name]
    seen = kept(call)
    call(**arguments())
    call(**arguments(**changes[which]))
    assert seen.served == 0, f"{changes[which].keys()} went to the kernels of another call"
    # Each is found again by what it was.
    call(**arguments())
    call(**arguments(**changes[which]))
    assert seen.served == 2


def test_every_argument_is_changed_above():
    changed: dict[str, set[str]] = defaultdict(lambda: {"validate"})
    for call, _, changes in OPERATIONS.values():
        changed[call.__module__].update(*changes)
    for call, *_ in OPERATIONS.values():
        assert {*inspect.signature(call).parameters} <= changed[call.__module__] | READ_ANEW, call


@pytest.mark.parametrize(
    ("name", "which"),
    [(name, i) for name in OPERATIONS if name != "mla_decode" for i in range(-1, len(OPERATIONS[name][2]))],
)
def test_a_repeated_call_has_its_own_addresses_and_results_like_the_first(
    kept, monkeypatch, name, which
) -> None:
    call, arguments, changes = OPERATIONS[name]
    module = sys.modules[call.__module__]
    seen, launched, tensors = kept(call), module.launched, []

    def noted(kernel: Any, grid: Any, given: Any, *sizes: Any, **options: Any) -> Any:
        tensors[:] = given
        return launched(kernel, grid, given, *sizes, **options)

    def addresses(old: Any, new: Any) -> list[int | None]:
        """Those of the first launch, with the results of another call in place of its own."""
        place = {x.data_ptr(): y.data_ptr() for x, y in zip(old or (), new or (), strict=True)}
        return [None if x is None else place.get(x.data_ptr(), x.data_ptr()) for x in tensors]

    monkeypatch.setattr(module, "launched", noted)
    given = arguments(**changes[which] if which >= 0 else {})
    first, second = call(**given), call(**given)
    assert seen.addresses == addresses(first, second)
    assert [(x.shape, x.dtype) for x in first or ()] == [(x.shape, x.dtype) for x in second or ()]
    if "out" in inspect.signature(call).parameters and "out" not in given:
        for _ in range(2):
            assert all(x is y for x, y in zip(call(**given, out=first), first, strict=True))
        assert seen.addresses == addresses(first, first)
        # Into other memory of the same layout.
        other = tuple(x.clone() for x in first)
        call(**given, out=other)
        assert seen.addresses == addresses(first, other)


# Each tensor beside the first, of each dtype: the operation, and arguments among which it is.
BESIDE = {
    (name, argument, getattr(value, "dtype", None)): given
    for name, (_, arguments, changes) in OPERATIONS.items()
    for given in (arguments(), *(arguments(**change) for change in changes))
    for argument, value in given.items()
    if isinstance(value, torch.Tensor | tuple) and argument != next(iter(arguments()))
}


def _apart(x: torch.Tensor) -> torch.Tensor:
    """As large, but no two elements side by side."""
    return torch.empty_strided(x.shape, [2 * step for step in x.stride()], dtype=x.dtype)


def _longer(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(len(x) + 1, *x.shape[1:])


# The change, and what is expected instead.
MISFITS = {
    "device": (lambda x: x.to("meta"), "a tensor on cpu, got one on meta"),
    "strides": (_apart, "a.* contiguous.*, got .*strides"),
    "dtype": (lambda x: x.double(), ".*DTYPE.*, got torch.float64"),
    "first axis": (lambda x: x.new_empty(len(x) + 1, *x.shape[1:]), r".*shape \(.*, got "),
    "last axis": (lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] + 1), r".*shape \(.*, got "),
}
# A cache and a table may have more pages, rows are counted by out, and a mask of no bool is a count.
FITTING = {
    *(("mla_decode", "kv_cache", "first axis"), ("mla_decode", "block_table", "last axis")),
    *(("clear_empty_rows", "seq_lens", f"{end} axis") for end in ("first", "last")),
    ("quantize_fp8_per_tensor", "live_rows", "dtype"),
}


@pytest.mark.parametrize(
    ("name", "argument", "dtype", "misfit"),
    [(*key, misfit) for key in BESIDE for misfit in MISFITS if (*key[:2], misfit) not in FITTING],
)
def test_a_tensor_that_does_not_fit_the_first_is_named(
    name: str, argument: str, dtype: torch.dtype | None, misfit: str
) -> None:
    given, (move, message) = BESIDE[name, argument, dtype], MISFITS[misfit]
    whole = given[argument] if isinstance(given[argument], tuple) else (given[argument],)
    for place, tensor in enumerate(whole):
        if move is _apart and tensor.numel() == 1:
            continue
        moved = (*whole[:place], move(tensor), *whole[place + 1 :])
        changed = moved if isinstance(given[argument], tuple) else moved[0]
        named = f"out\\[{place}\\]" if isinstance(given[argument], tuple) else argument
        expected = message.replace("DTYPE", str(tensor.dtype))
        with pytest.raises(ValueError, match=f"^{named}: expected {expected}"):
            OPERATIONS[name][0](**given | {argument: changed})


def test_each_function_has_calls_of_its_own(kept) -> None:
    seen = kept(topk.topk_softmax)
    for call in (topk.topk_softmax, topk.topk_sigmoid, topk.topk_softplus_sqrt):
        call(**_route())
    topk.grouped_topk(**_groups())
    assert seen.served == 0


BAD_VALUES = {
    "mla_decode": ({"seq_lens": ints(3, 33)}, r"seq_lens\[1\]"),
    "clear_empty_rows": (
        {"seq_lens": ints(1, 1, 1, 1), "query_start_loc": ints(0, 3, 2, 3, 4)},
        "query_start_loc",
    ),
    "quantize_fp8_per_tensor": ({"live_rows": ints(7)}, "live_rows"),
    "quantize_nvfp4": ({"global_scale": torch.zeros(1)}, "global_scale"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_values_are_checked_although_the_call_was_made_before(kept, name: str) -> None:
    (call, arguments, _), (change, named) = OPERATIONS[name], BAD_VALUES[name]
    seen, given = kept(call), arguments(**change)
    call(**given)
    with pytest.raises(ValueError, match=named):
        call(**given, validate=True)
    assert seen.served == 0
