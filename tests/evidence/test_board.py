"""The board's kernels against a plain count, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from staleproof.evidence.board import NEVER, Board, crossing
from staleproof.evidence.canary import plant

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(name="device", autouse=True)
def device_fixture(device):
    """Tensors are made where the kernels run."""
    with torch.device(device):
        yield device


def spoilt(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows with a NaN or an Inf here and there."""
    draw = torch.Generator("cpu").manual_seed(seed)
    x = torch.rand(rows, columns, generator=draw, device="cpu")
    bad = torch.rand(rows, columns, generator=draw, device="cpu") < 0.3 / columns
    other = -torch.nan if dtype == torch.float8_e4m3fn else -torch.inf
    x[bad] = torch.where(torch.rand(int(bad.sum()), generator=draw, device="cpu") < 0.5, torch.nan, other)
    return x.to(torch.get_default_device(), dtype)


def begun(device: str, live: int) -> Board:
    """A board in its first step, of so many live rows."""
    board = Board(device)
    board.begin(1, live, counted=True)
    return board


def slot_of(board: Board, slot: int) -> list[int]:
    return board.slots()[slot].tolist()


@pytest.mark.parametrize(
    ("dtype", "rows", "columns"),
    [*((dtype, 37, 6) for dtype in DTYPES), (torch.bfloat16, 130, 100), (torch.float16, 5, 9000)],
)
def test_rows_are_those_of_a_plain_count(device, dtype, rows, columns):
    live, board, bad, first = rows // 2, Board(device), [], None
    for seed in range(2):
        x = spoilt(rows, columns, dtype, seed)
        board.begin(seed + 1, live, counted=True)
        board.count(3, x)
        bad.append(~x.float().isfinite().all(1))
        if first is None and bad[-1][:live].any():
            first = seed + 1, 3, int(bad[-1][:live].nonzero()[0]), False
    want = [sum(int(b[live:].sum()) for b in bad), sum(int(b[:live].sum()) for b in bad)]
    assert slot_of(board, 3) == [*want, 0, 0, 0, 0, 2]
    assert crossing(int(board.numbers[-1])) == first


def test_strided_rows_need_no_copy_and_give_the_same(device):
    wide = spoilt(16, 64, torch.bfloat16)
    board = begun(device, 9)
    board.count(0, wide[:, :40])
    board.count(1, wide[:, :40].contiguous())
    board.count(2, wide.view(16, 8, 8).transpose(1, 2))  # a row is not contiguous
    board.count(3, wide)
    assert slot_of(board, 0) == slot_of(board, 1)
    assert slot_of(board, 2) == slot_of(board, 3)


@pytest.mark.parametrize(("top_k", "dtype"), [(1, torch.int32), (8, torch.int32), (32, torch.int64)])
def test_repeats_are_those_of_a_plain_count(device, top_k, dtype):
    draw = torch.Generator("cpu").manual_seed(top_k)
    ids = torch.randint(-1, 40, (67, top_k), generator=draw, device="cpu").to(device, dtype)
    # The first expert, and no expert at all.
    ids[0], ids[1] = 0, -1
    weights = spoilt(67, top_k, torch.float32, seed=top_k)
    board = begun(device, 40)
    board.count(5, weights, ids)
    twice = [len({i for i in row if i >= 0}) < sum(i >= 0 for i in row) for row in ids.tolist()]
    bad = ~weights.isfinite().all(1)
    want = [int(bad[40:].sum()), int(bad[:40].sum()), 0, 0, sum(twice[40:]), sum(twice[:40]), 1]
    assert slot_of(board, 5) == want


@pytest.mark.parametrize(("wide", "pattern"), [(torch.float32, 0x7FFF), (torch.bfloat16, 0xFFFF - 2**16)])
def test_a_nan_of_the_hardware_is_no_canary_after_a_conversion(device, wide, pattern):
    """Hardware makes 0x7FFF in bfloat16, which is 0x7FFF0000 in float32: neither all 0 nor all 1."""
    narrow = torch.tensor([[pattern]], dtype=torch.int16).view(torch.bfloat16)
    board = begun(device, 1)
    board.count(0, narrow.to(wide))
    board.count(1, narrow.to(wide), torch.zeros(1, 1, dtype=torch.int32))
    assert slot_of(board, 0)[:4] == slot_of(board, 1)[:4] == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float32, 8191), (torch.float16, 255), (torch.bfloat16, 31)]
)
def test_canaries_are_recognised_up_to_a_number(device, dtype, largest):
    for number, seen in ((1, 1), (largest, 1), (largest + 1, 0)):
        board = begun(device, 1)
        board.count(0, plant(torch.ones(1, 8, dtype=dtype), stage=number))
        assert slot_of(board, 0)[:4] == [0, 1, 0, seen]


@pytest.mark.parametrize("reset", [False, True])
def test_a_step_that_is_not_counted_changes_nothing(device, reset):
    board = Board(device)
    board.begin(1, 4, counted=reset)
    if reset:
        board.reset()
    board.count(0, torch.full((8, 4), torch.nan), torch.zeros(8, 4, dtype=torch.int32))
    board.count(1, torch.full((8, 4), torch.nan))
    assert not board.numbers[:-2].any()
    assert board.numbers[-2:].tolist() == [NEVER, NEVER]


def test_the_steps_of_a_server_that_runs_for_months_begin_again(device):
    board = Board(device)
    board.begin(2**30 + 5, 1, counted=True)
    board.count(3, torch.full((2, 2), torch.nan))
    assert [crossing(packed)[:3] for packed in board.numbers[-2:].tolist()] == [(5, 3, 1), (5, 3, 0)]


BAD_INPUTS = [
    (256, torch.ones(2, 2), None, None, "slot: expected 0 to 255, got 256"),
    (0, torch.ones(2, 2, dtype=torch.float64), None, None, "x: expected torch.float32 or"),
    (0, torch.ones(0, 2), None, None, "x: expected at least one row"),
    (0, torch.ones(2), None, None, "x: expected at least one row"),
    (0, torch.ones(2, 2), torch.ones(2, 3, dtype=torch.int32), None, "ids: expected 1 to 32 ids"),
    (0, torch.ones(2, 2), torch.ones(2, 2), None, "ids: expected torch.int32 or torch.int64"),
    (0, torch.ones(2, 33), torch.ones(2, 33, dtype=torch.int32), None, "ids: expected 1 to 32 ids"),
    (-1, torch.ones(2, 2), None, None, "slot: expected 0 to 255, got -1"),
    (0, torch.ones(2, 0), None, None, "x: expected at least one row"),
    (0, torch.ones(2, 2, device="meta"), None, None, "x: expected .*(cpu|cuda)"),
    (0, torch.ones(2, 2), None, torch.ones(2, dtype=torch.int8), "padding: expected torch.bool"),
    (0, torch.ones(2, 2), None, torch.ones(4, dtype=torch.bool), "padding: expected a contiguous"),
    (0, torch.ones(1, 1).expand(2**24, 1), None, None, "x: expected at least one row, fewer than"),
    (0, torch.ones(2, 2), None, torch.ones(1, dtype=torch.bool), "padding: expected at least 2 entries"),
    (0, torch.ones(2, 2), None, torch.ones(2, 1, dtype=torch.bool), "padding: expected a tensor of rank"),
]


def test_bad_input_is_named_and_nothing_is_counted(device):
    for slot, x, ids, padding, said in BAD_INPUTS:
        board = begun(device, 0)
        x, ids, padding = (t if t is None or t.is_meta else t.to(device) for t in (x, ids, padding))
        if said.endswith("contiguous"):
            # A copy to another device would be.
            padding = padding[::2]
        with pytest.raises(ValueError, match=said):
            board.count(slot, x, ids, padding)
        assert not board.numbers[:-2].any()


class Launches:
    """In place of Triton: counts what is compiled, and what is launched again without that."""

    def __init__(self) -> None:
        self.made: list[tuple[object, ...]] = []
        self.again: list[tuple[int, tuple[object, ...]]] = []

    def __call__(self, kernel, grid, tensors, sizes, **options):
        number = len(self.made)
        self.made.append((kernel, *sizes))
        return lambda *addresses: self.again.append((number, addresses))


X = torch.ones(8, 16)
IDS = torch.zeros(8, 4, dtype=torch.int32)
# Arguments of Board.count that differ in one thing, each of which the compiled kernel or its sizes depend on.
COUNTED = {
    "plain": (0, X, None, None),
    "slot": (1, X, None, None),
    "dtype": (0, X.half(), None, None),
    "rows": (0, X[:7], None, None),
    "columns": (0, torch.ones(8, 15), None, None),
    "stride": (0, torch.ones(8, 32)[:, :16], None, None),
    "alignment": (0, torch.ones(129)[1:].view(8, 16), None, None),
    "padding": (0, X, None, torch.zeros(8, dtype=torch.bool)),
    "alignment of padding": (0, X, None, torch.zeros(9, dtype=torch.bool)[1:]),
    "ids": (0, torch.ones(8, 4), IDS, None),
    "slot of ids": (2, torch.ones(8, 4), IDS, None),
    "dtype of ids": (0, torch.ones(8, 4), IDS.long(), None),
    "stride of ids": (0, torch.ones(8, 4), torch.zeros(8, 8, dtype=torch.int32)[:, :4], None),
    "alignment of ids": (0, torch.ones(8, 4), torch.zeros(33, dtype=torch.int32)[1:].view(8, 4), None),
    "padding beside ids": (0, torch.ones(8, 4), IDS, torch.zeros(8, dtype=torch.bool)),
}


def test_each_slot_and_layout_is_launched_with_its_own_numbers():
    launches = Launches()
    with torch.device("cpu"):
        board = Board("cpu", launch=launches)
        for turn in range(2):
            for number, (slot, x, ids, padding) in enumerate(COUNTED.values()):
                board.count(slot, x, ids, padding)
                if turn:
                    assert launches.again[-1][0] == number
                    assert launches.again[-1][1][0] == x.data_ptr()
        with pytest.raises(ValueError, match="ids: expected 1 to 32 ids for each of the 8 rows"):
            board.count(0, torch.ones(8, 4), IDS[:7])
    assert len(launches.made) == len(launches.again) == len(COUNTED)
    assert [made[1] for made in launches.made] == [slot for slot, *_ in COUNTED.values()]


def test_a_copy_is_never_launched_again_by_its_address():
    launches = Launches()
    with torch.device("cpu"):
        board = Board("cpu", launch=launches)
        for _ in range(3):
            board.count(0, torch.ones(16, 8, 8).transpose(1, 2))
            board.count(0, torch.ones(8, 4), torch.zeros(4, 8, dtype=torch.int32).T)
    assert (len(launches.made), launches.again) == (6, [])


@pytest.mark.parametrize("routed", [False, True])
def test_a_mask_says_which_rows_are_padding_and_canaries_are_counted_apart(device, routed):
    x = torch.ones(34, 4)
    plant(x[0:2], stage=5)
    x[2, 3], x[33, 0], x[32, 1] = torch.nan, torch.inf, torch.nan
    ids = torch.arange(4, dtype=torch.int32).repeat(34, 1)
    ids[4:6, 3] = ids[33, 0] = 2
    padding = torch.zeros(40, dtype=torch.bool)
    padding[[0, 5, 32]] = True
    board = begun(device, 34)
    board.count(3, x, ids if routed else None, padding)
    assert slot_of(board, 3) == [2, 3, 1, 1, *((1, 2) if routed else (0, 0)), 1]
    assert [crossing(packed) for packed in board.numbers[-2:].tolist()] == [(1, 3, 0, True), (1, 3, 1, True)]
    assert not board.slots()[4:].any()
    assert not board.slots()[:3].any()
