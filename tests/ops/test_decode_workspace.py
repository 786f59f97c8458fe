"""DecodeWorkspace: what its key tells apart, and that it cannot grow once locked."""

from __future__ import annotations

import threading

import pytest
import torch

from staleproof.evidence import plant, row_states
from staleproof.ops.decode_workspace import DecodeWorkspace, WorkspaceLocked

SHAPE = (8, 4, 16)
BF16 = torch.bfloat16


def test_layers_share_and_smaller_batches_are_the_first_rows(device):
    workspace = DecodeWorkspace()
    whole = workspace.get(SHAPE, BF16, device)
    assert (tuple(whole.shape), whole.dtype, whole.is_contiguous()) == (SHAPE, BF16, True)
    part = workspace.get((3, 4, 16), BF16, device)
    assert part.data_ptr() == whole.data_ptr()
    # Four query tokens a request take as many rows.
    tokens = workspace.get((2, 4, 4, 16), BF16, device)
    assert (tuple(tokens.shape), tokens.data_ptr()) == ((2, 4, 4, 16), whole.data_ptr())
    assert workspace.nbytes == whole.nbytes


@pytest.mark.parametrize(
    ("shape", "dtype", "micro_batch"),
    [
        ((8, 2, 16), BF16, 0),
        ((8, 4, 32), BF16, 0),
        # As many elements a row, cut otherwise.
        ((8, 8, 8), BF16, 0),
        (SHAPE, torch.float16, 0),
        (SHAPE, BF16, 1),
        # That of the current stream.
        (SHAPE, BF16, None),
    ],
)
def test_each_part_of_the_key_has_its_own_memory(device, shape, dtype, micro_batch):
    workspace = DecodeWorkspace()
    first = plant(workspace.get(SHAPE, BF16, device, micro_batch=0), 1)
    other = workspace.get(shape, dtype, device, micro_batch=micro_batch)
    assert (tuple(other.shape), other.dtype) == (shape, dtype)
    other.zero_()
    assert row_states(first, 1) == ["unwritten"] * 8
    assert workspace.get(SHAPE, BF16, "meta").device.type == "meta"


def test_growth_before_the_lock_and_refusal_after(device):
    workspace = DecodeWorkspace()
    small = workspace.get((2, 4, 16), BF16, device)
    large = workspace.get(SHAPE, BF16, device)
    assert small.data_ptr() != large.data_ptr()
    workspace.lock()
    assert workspace.get(SHAPE, BF16, device).data_ptr() == large.data_ptr()
    with pytest.raises(WorkspaceLocked, match=r"shape \(9, 4, 16\).*needs 9 rows.*held 8 rows"):
        workspace.get((9, 4, 16), BF16, device)
    with pytest.raises(WorkspaceLocked, match=r"shape \(1, 2, 16\).*held none"):
        workspace.get((1, 2, 16), BF16, device)
    assert workspace.nbytes == large.nbytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            ((shape, BF16, "cpu"), r"shape: expected \(batch, heads, rank\)")
            for shape in ((8, 16), (8, 0, 16), (1, 2, 3, 4, 5), (-1, 4, 16), (8, 4, 16.0), "814", None)
        ),
        ((SHAPE, "bfloat16", "cpu"), "dtype: expected a torch.dtype, got 'bfloat16'"),
        ((SHAPE, BF16, "gpu"), "device: expected a device of torch, such as cuda:0, got 'gpu'"),
        ((SHAPE, BF16, 1.5), "device: expected a device of torch, such as cuda:0, got 1.5"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    workspace = DecodeWorkspace()
    with pytest.raises(ValueError, match=message):
        workspace.get(*arguments)
    assert workspace.nbytes == 0


class Meeting(dict):
    """A dict in which no thread's first look-up returns before every thread has looked."""

    def __init__(self, threads):
        super().__init__()
        self._gate, self._been = threading.Barrier(threads, timeout=60), threading.local()

    def get(self, key, default=None):
        found = super().get(key, default)
        if not hasattr(self._been, "here"):
            self._been.here = True
            self._gate.wait()
        return found


def test_threads_of_one_key_get_one_buffer():
    workspace, seen = DecodeWorkspace(), []
    # All find none, every time and not once in a while.
    workspace._buffers = Meeting(8)
    threads = [
        threading.Thread(target=lambda: seen.append(workspace.get(SHAPE, BF16, "cpu"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({x.data_ptr() for x in seen}) == 1
    assert len(seen) == 8


def filled(workspace, micro_batch=None):
    def call(x):
        buffer = workspace.get(x.shape, x.dtype, x.device, micro_batch=micro_batch)
        buffer.copy_(x)
        return buffer * 2

    return call


@pytest.mark.parametrize(("backend", "dynamic"), [("eager", False), ("aot_eager", True)])
def test_compiled_code_writes_the_buffer_of_the_moment(device, backend, dynamic):
    torch._dynamo.reset()
    workspace = DecodeWorkspace()
    call = filled(workspace, micro_batch=0)
    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=dynamic)
    # A larger buffer replaces the first, which is just large enough, and then one of its size the second.
    for rows in (3, 8, 8):
        workspace._buffers.clear() if rows == 8 else None
        buffer = workspace.get((rows, 4, 16), torch.float32, device, micro_batch=0).zero_()
        for value in (2.0, 3.0):
            x = torch.full((3, 4, 16), value, device=device)
            assert torch.equal(compiled(x), 2 * x)
            assert torch.equal(buffer[:3], x)


def test_growth_breaks_the_graph(device):
    torch._dynamo.reset()
    x = torch.ones(3, 4, 16, device=device)
    workspace = DecodeWorkspace()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="lock"):
        torch.compile(filled(workspace, 0), backend="eager", fullgraph=True)(x)
    assert workspace.nbytes == 0
    compiled = torch.compile(filled(workspace, 0), backend="eager")
    assert torch.equal(compiled(x), 2 * x)
    assert torch.equal(workspace.get((3, 4, 16), torch.float32, device, micro_batch=0), x)
    workspace.lock()
    with pytest.raises(WorkspaceLocked, match="needs 5 rows"):
        compiled(torch.ones(5, 4, 16, device=device))


def test_compiled_code_is_not_tied_to_the_stream_it_was_compiled_on(monkeypatch):
    """Streams that the test names, in front of buffers in CPU memory."""
    torch._dynamo.reset()
    workspace, cuda = DecodeWorkspace(), torch.device("cuda", 0)
    stream = "first"
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    for name in ("first", "second"):
        workspace._buffers[cuda, name, BF16, 4, 16] = torch.zeros(SHAPE, dtype=BF16)

    def call(x):
        return workspace.get(SHAPE, BF16, cuda).add_(x)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="micro_batch: expected a number"):
        torch.compile(call, backend="eager", fullgraph=True)(torch.ones(16))
    compiled = torch.compile(call, backend="eager")
    for name in ("first", "second"):
        stream = name
        compiled(torch.ones(16))
    assert all(bool((buffer == 1).all()) for buffer in workspace._buffers.values())


@pytest.mark.gpu
def test_two_streams_never_share(device):
    workspace = DecodeWorkspace()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    mixed = 0
    for _ in range(50):
        outs = []
        for stage, stream in enumerate(streams, 1):
            with torch.cuda.stream(stream):
                outs.append(plant(workspace.get((64, 16, 512), BF16, device), stage))
                torch.cuda._sleep(100_000)
        for stage, (stream, out) in enumerate(zip(streams, outs, strict=True), 1):
            with torch.cuda.stream(stream):
                mixed += sum(state != "unwritten" for state in row_states(out, stage))
    assert mixed == 0
    assert workspace.nbytes == 2 * 64 * 16 * 512 * 2
