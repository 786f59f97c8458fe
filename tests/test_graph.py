"""A recorded launch list freezes what a CUDA graph freezes."""

import pytest
import torch

from staleproof.evidence import plant, row_states
from staleproof.graph import LaunchList, capture, padded_size
from staleproof.ops.clear_empty_rows import clear_empty_rows


def test_replay_recomputes_views_in_place_writes_and_fresh_results(device):
    x = torch.arange(8.0, device=device)
    seen = {}

    def step():
        y = x * 2
        z = (y + 1).view(2, 4)
        z.mul_(10)
        seen["z"] = z

    graph = capture(step, device)
    x.fill_(3.0)
    graph.replay()
    assert torch.equal(seen["z"], torch.full((2, 4), 70.0, device=device))


def test_python_does_not_run_at_replay(device):
    x = torch.zeros(1, device=device)
    host = {"n": 5, "calls": 0}

    def step():
        host["calls"] += 1
        x.add_(host["n"])

    graph = capture(step, device)
    calls = host["calls"]
    x.zero_()
    host["n"] = 100
    graph.replay()
    assert x.item() == 5.0
    assert host["calls"] == calls


def test_memory_that_no_launch_writes_keeps_its_bytes_between_replays(device):
    seen = {}

    def step():
        seen["out"] = torch.empty(4, 8, device=device)
        seen["out"][0].fill_(1.0)

    graph = capture(step, device)
    plant(seen["out"])
    graph.replay()
    assert row_states(seen["out"]) == ["finite", "unwritten", "unwritten", "unwritten"]


def test_triton_launches_are_part_of_the_step(device):
    out = torch.ones(4, 2, 8, device=device)
    seq_lens = torch.tensor([1, 1, 1, 1], dtype=torch.int32, device=device)
    graph = capture(lambda: clear_empty_rows(out, seq_lens), device)
    seq_lens[2:] = 0
    graph.replay()
    assert out[:2].eq(1).all()
    assert out[2:].eq(0).all()


def test_launch_list_names_launches_and_no_allocation(device):
    if device != "cpu":
        pytest.skip("a launch list stands for a CUDA graph on a CPU")
    seq_lens = torch.tensor([1, 0], dtype=torch.int32)

    def step():
        out = torch.empty(2, 2, 8)
        _ = out.new_empty(2), torch.empty_like(out), torch.empty_strided((2,), (1,))
        _ = out.new_empty_strided((2,), (1,))
        out.fill_(1.0)
        clear_empty_rows(out, seq_lens)

    step()
    assert LaunchList(step).names == ["aten::fill_", "_clear_empty_rows_kernel"]


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.Tensor.nonzero])
def test_capture_that_reads_a_value_back_is_refused(device, read):
    x = torch.ones(1, device=device)
    with pytest.raises(RuntimeError, match=r"captur"):
        capture(lambda: read(x), device)


def test_batch_replays_the_next_captured_size_and_a_larger_one_is_refused():
    sizes = {1: 1, 3: 4, 4: 4, 5: 8, 256: 256, 257: 272, 511: 512, 512: 512}
    assert {live: padded_size(live) for live in sizes} == sizes
    for live in (0, 513):
        with pytest.raises(ValueError, match=f"^live: expected 1 to 512, got {live}$"):
            padded_size(live)


def test_operation_that_writes_in_place_and_returns_a_new_tensor_is_replayed(device):
    x, seen = torch.zeros(4, device=device), {}

    def step():
        seen["sorted"], seen["order"] = (x * -1).sort()
        x.view(2, 2)[0].add_(1)

    graph = capture(step, device)
    x.copy_(torch.tensor([3.0, 1.0, 2.0, 0.0]))
    graph.replay()
    assert (seen["sorted"].tolist(), seen["order"].tolist()) == ([-3, -2, -1, 0], [0, 2, 1, 3])
    assert x.tolist() == [4, 2, 2, 0]
