"""What a call that was made before must have in common with this one, to be repeated without checks.

On a GPU the first call of each layout keeps its compiled kernels, and later ones only fill in addresses. On a
CPU a launch is kept that the interpreter repeats on other addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.bits import assert_same_bits, moved

from staleproof import graph
from staleproof.ops import clear_empty_rows, distinct_experts, fp8, launching, nvfp4, topk
from staleproof.ops.launching import Seen
from staleproof.ops.mla import decode

Arguments = dict[str, Any]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _mla(**change: Any) -> Arguments:
    given = {
        "q": torch.ones(2, 4, 96),
        "kv_cache": torch.ones(6, 16, 96),
        "block_table": ints(0, 5, 4, 1).view(2, 2),
        "seq_lens": ints(3, 20),
        "softmax_scale": 0.1,
        "kv_lora_rank": 64,
        "num_kv_splits": 1,
    }
    return given | change


def _clear(**change: Any) -> Arguments:
    return {"out": torch.ones(4, 2, 8), "seq_lens": ints(5, 0, 4, 0)} | change


def _fp8(**change: Any) -> Arguments:
    return {"x": torch.ones(6, 40)} | change


def _route(**change: Any) -> Arguments:
    return {"router_logits": torch.ones(5, 16), "top_k": 4} | change


def _groups(**change: Any) -> Arguments:
    return _route(num_expert_group=4, topk_group=2) | change


def _fp4(**change: Any) -> Arguments:
    return {"x": torch.ones(4, 64), "global_scale": torch.ones(1)} | change


def _ids(**change: Any) -> Arguments:
    return {
        "topk_ids": torch.arange(15, dtype=torch.int32).view(5, 3) % 4,
        "topk_weights": torch.ones(5, 3),
    } | change


PADDING = torch.zeros(5, dtype=torch.bool)
# Function, arguments, and changes of them that another kernel or another grid serves.
Operation = tuple[Callable[..., Any], Callable[..., Arguments], list[Arguments]]
OPERATIONS: dict[str, Operation] = {
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
            {"q": torch.ones(2, 2, 4, 96)},
            {"kv_cache": torch.ones(6, 32, 96)},
            {"kv_cache": torch.ones(6, 16, 96).to(torch.float8_e4m3fn)},
            {"block_table": ints(0, 5, 1, 4, 1, 2).view(2, 3)},
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
            {"query_start_loc": ints(0, 1, 1, 3, 4)},
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
            # Two launches.
            {"x": torch.ones(16, 600), "is_padding": torch.zeros(16, dtype=torch.bool)},
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


def _deepseek(batch: int, heads: int, q_len: int | None = None) -> Operation:
    rows = (batch, heads) if q_len is None else (batch, q_len, heads)
    given = {
        "q": torch.ones(*rows, 576).bfloat16(),
        "kv_cache": torch.ones(4 * batch, 64, 576).bfloat16(),
        "block_table": torch.arange(4 * batch, dtype=torch.int32).view(batch, 4),
        "seq_lens": torch.arange(batch, dtype=torch.int32) * 37 % 256,
        "softmax_scale": 0.04,
    }
    return decode.mla_decode, lambda **change: given | change, []


ON_A_GPU: dict[str, Callable[[], Operation]] = {
    "mla_decode, splits": lambda: _deepseek(2, 128),
    "mla_decode, Hopper": lambda: _deepseek(256, 128),
    "mla_decode, 2 query tokens": lambda: _deepseek(3, 16, 2),
}


def _varied(name: str, value: Any, seed: int, device: str) -> Any:
    """Other contents in the same layout."""
    if isinstance(value, tuple):
        return tuple(_varied(name, one, seed, device) for one in value)
    if not isinstance(value, torch.Tensor):
        return value
    if name == "query_start_loc":
        other = value.clamp(max=seed)
    elif value.dtype == torch.bool:
        other = torch.arange(len(value)) % seed == 1
    elif value.is_floating_point():
        other = torch.rand(value.shape, generator=torch.Generator().manual_seed(seed)) + 0.5
    else:
        other = value.long() * seed % (value.max() + 1)
    return moved(value, device).copy_(other)


def _replay(kernel: Any, grid: Any, tensors: Any, sizes: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What a GPU would keep of a launch: all but the addresses. Under the interpreter nothing is compiled."""
    layouts = [x if x is None else (x.dtype, x.shape, x.stride()) for x in tensors]

    def at(layout: Any, address: int | None) -> torch.Tensor | None:
        assert (layout is None) == (address is None)
        if layout is None:
            return None
        dtype, shape, strides = layout
        elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, strides)

    def again(*addresses: int | None) -> None:
        kernel[grid](*(at(*pair) for pair in zip(layouts, addresses, strict=True)), *sizes, **options)

    return again


@pytest.fixture(name="launches")
def launches_fixture(device: str, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Filled with each launch by Triton's own way."""
    found: list[object] = []
    launched = launching.launched

    def counted(kernel: Any, grid: Any, tensors: Any, sizes: Any, **options: Any) -> Any:
        found.append(kernel)
        sizes = tuple(sizes)
        made = launched(kernel, grid, tensors, sizes, **options)
        return _replay(kernel, grid, tensors, sizes, options) if device == "cpu" else made

    for module in {call.__module__ for call, *_ in OPERATIONS.values()}:
        monkeypatch.setattr(f"{module}.launched", counted)
        monkeypatch.setattr(f"{module}._SEEN", Seen())
    if device != "cpu":
        monkeypatch.setattr("staleproof.ops.mla.hopper_call.launched", counted)
    return found


def _called(operation: Operation, change: Arguments, seed: int, device: str) -> tuple[torch.Tensor, ...]:
    """The results, in the memory that was given for them."""
    call, arguments, _ = operation
    given = {name: _varied(name, value, seed, device) for name, value in arguments(**change).items()}
    places = [x for name in ("out", "lse") if (x := given.get(name)) is not None]
    places = [*places[0]] if places and isinstance(places[0], tuple) else places
    results = call(**given)
    assert results is None or all(any(x is result for result in results) for x in places)
    return results or tuple(places)


@pytest.mark.parametrize(
    "name", [*OPERATIONS, *(pytest.param(name, marks=pytest.mark.gpu) for name in ON_A_GPU)]
)
def test_a_repeated_call_takes_the_short_way_to_the_same_bits_and_another_one_does_not(
    device: str, name: str, launches: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = OPERATIONS[name] if name in OPERATIONS else ON_A_GPU[name]()
    changes = [{}, *operation[2]]
    for change in changes:
        before = len(launches)
        _called(operation, change, 3, device)
        assert len(launches) > before, f"{change.keys()} went to the kernels of another call"
    before = len(launches)
    short = [_called(operation, change, 5, device) for change in changes]
    assert len(launches) == before
    monkeypatch.setattr(Seen, "get", lambda *_: None)
    for change, results in zip(changes, short, strict=True):
        assert_same_bits(results, _called(operation, change, 5, device))
    assert len(launches) == 2 * before


def test_values_between_words_are_copied_and_the_address_of_the_copy_is_not_kept(device, launches) -> None:
    for seed in (3, 5):
        _called(OPERATIONS["quantize_nvfp4"], {"x": torch.ones(5, 97).bfloat16()[:, :96]}, seed, device)
    assert len(launches) == 2


@pytest.mark.gpu
def test_another_alignment_stream_or_bad_argument_is_not_mistaken_for_the_last_call(launches) -> None:
    clear = clear_empty_rows.clear_empty_rows
    memory = torch.full((4 * 8 * 512 + 1,), torch.nan, dtype=torch.bfloat16, device="cuda")
    lengths = ints(0, 0, 0, 0).cuda()
    for start in (0, 1, 0, 1):
        out = memory[start : start + 4 * 8 * 512].view(4, 8, 512)
        clear(out, lengths)
        assert not out.isnan().any()
        memory.fill_(torch.nan)
    assert len(launches) == 2
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out = torch.full((4, 8, 512), torch.nan, dtype=torch.bfloat16, device="cuda")
        lengths = ints(0, 0, 0, 0).cuda()
        torch.cuda._sleep(20_000_000)
        clear(out, lengths)
        bad = out.isnan().any()
    stream.synchronize()
    assert not bad
    with pytest.raises(ValueError, match=r"seq_lens: expected torch\.int32"):
        clear(out, lengths.long())
    with pytest.raises(ValueError, match="seq_lens: expected a tensor on cuda:0"):
        clear(out, lengths.cpu())


@pytest.mark.gpu
def test_a_short_call_is_captured(launches) -> None:
    clear = clear_empty_rows.clear_empty_rows
    out, lengths = torch.ones(4, 8, 512, device="cuda").bfloat16(), ints(3, 3, 3, 3).cuda()
    captured = graph.capture(lambda: clear(out, lengths), on="cuda")
    assert len(launches) == 1
    lengths.copy_(ints(3, 0, 3, 0))
    out.fill_(torch.nan)
    captured.replay()
    assert out.isnan().flatten(1).any(1).tolist() == [True, False, True, False]


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
    "first axis": (_longer, r".*shape \(.*, got "),
    "last axis": (lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] + 1), r".*shape \(.*, got "),
}
# A cache and a table may have more pages, rows are counted by out, and a mask of no bool is a count.
FITTING = {
    *(("mla_decode", "kv_cache", "first axis"), ("mla_decode", "block_table", "last axis")),
    *(("clear_empty_rows", "seq_lens", f"{end} axis") for end in ("first", "last")),
    ("quantize_fp8_per_tensor", "live_rows", "dtype"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_tensor_that_does_not_fit_the_first_is_named(name: str) -> None:
    for key, given in BESIDE.items():
        for misfit in MISFITS:
            if key[0] == name and (*key[:2], misfit) not in FITTING:
                _is_named(name, key[1], given, *MISFITS[misfit])


def _is_named(name: str, argument: str, given: Arguments, move: Callable[..., Any], message: str) -> None:
    whole = given[argument] if isinstance(given[argument], tuple) else (given[argument],)
    for place, tensor in enumerate(whole):
        if move is _apart and tensor.numel() == 1:
            continue
        changed = (*whole[:place], move(tensor), *whole[place + 1 :])
        changed = changed if isinstance(given[argument], tuple) else changed[0]
        named = f"out\\[{place}\\]" if isinstance(given[argument], tuple) else argument
        expected = message.replace("DTYPE", str(tensor.dtype))
        with pytest.raises(ValueError, match=f"^{named}: expected {expected}"):
            OPERATIONS[name][0](**given | {argument: changed})


def test_each_function_has_calls_of_its_own(device: str, launches: list[object]) -> None:
    calls = topk.topk_softmax, topk.topk_sigmoid, topk.topk_softplus_sqrt
    for number, call in enumerate(calls):
        _called((call, _route, []), {}, 3, device)
        assert len(launches) == number + 1
    _called(OPERATIONS["grouped_topk"], {}, 3, device)
    assert len(launches) == 4


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
def test_values_are_checked_although_the_call_was_made_before(device: str, launches, name: str) -> None:
    (call, arguments, _), (change, named) = OPERATIONS[name], BAD_VALUES[name]
    given = {key: moved(value, device) for key, value in arguments(**change).items()}
    call(**given)
    before = len(launches)
    with pytest.raises(ValueError, match=named):
        call(**given, validate=True)
    assert len(launches) == before
