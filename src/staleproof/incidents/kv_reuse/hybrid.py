"""A hybrid model reduced to what this incident needs, served from one pool of bytes.

Two layer pairs: a Gated-DeltaNet-like layer (a causal convolution, then a decaying outer-product
state in fp32), then attention over a paged cache. The stale values are real: a block that gets a new
owner contains what this model computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from staleproof.check import require
from staleproof.device import one_thread
from staleproof.evidence.canary import bits
from staleproof.incidents.kv_reuse.attention import HEAD_DIM, Attend, Call, used_table
from staleproof.incidents.kv_reuse.block_pool import AttentionSpec, KVBuffers, MambaSpec, split_block_table
from staleproof.incidents.kv_reuse.scheduler import VOCABULARY, Step, Tables, Trace

LAYERS, HIDDEN, HEADS = 2, 64, 1
STATE = MambaSpec.gated_delta_net(v_heads=2, k_heads=2, v_dim=16, k_dim=16, kernel=4)
KERNEL_BLOCK = 16


class FirstStep(StrEnum):
    """What a Mamba layer does with the state of a request that has none yet."""

    # Both states start from zero and are written whole.
    OVERWRITTEN = "overwritten"
    # The flag "has an initial state" is wrong: both states are loaded from the block, with stale bytes.
    LOADED = "loaded"
    # The convolution computes the right output, but stores only the newest column of its state.
    PARTLY_WRITTEN = "partly written"


@dataclass(frozen=True)
class _Layer:
    conv_in: torch.Tensor
    conv: torch.Tensor
    ssm_out: torch.Tensor
    qkv: torch.Tensor
    attn_out: torch.Tensor


def attention_spec(dtype: torch.dtype, *, kv_outermost: bool = False) -> AttentionSpec:
    """The model's attention cache in one dtype."""
    return AttentionSpec(1, HEAD_DIM, dtype, kv_outermost)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class HybridModel:
    """The weights, drawn from a seed.

    Args:
        device: of the weights.
        attend: the attention kernel.
        first_step: what a Mamba layer does at the first token of a request.
    """

    def __init__(self, device: str, attend: Attend, first_step: FirstStep = FirstStep.OVERWRITTEN) -> None:
        self.attend, self.first_step = attend, first_step
        # The dtype in which attention computes.
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(5)

        def weight(*shape: int) -> torch.Tensor:
            drawn = torch.randn(shape, generator=generator) / shape[0] ** 0.5
            return drawn.to(device)

        self.embedding = weight(VOCABULARY, HIDDEN) * VOCABULARY**0.5
        kernel, channels = STATE.conv_shape[0] + 1, STATE.conv_shape[1]
        inner = STATE.ssm_shape[0] * STATE.ssm_shape[1]
        self.layers = [
            _Layer(
                weight(HIDDEN, channels),
                weight(kernel, channels),
                weight(inner, HIDDEN),
                weight(HIDDEN, (HEADS + 2) * HEAD_DIM),
                weight(HEADS * HEAD_DIM, HIDDEN),
            )
            for _ in range(LAYERS)
        ]

    def step(
        self,
        buffers: KVBuffers,
        states: KVBuffers,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        first: torch.Tensor,
        tables: Tables,
        taps: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Feed one token a row.

        Args:
            buffers: memory of the attention layers.
            states: memory of the Mamba layers; the same one in a hybrid pool.
            tokens: (rows,) int64.
            positions: (rows,) int64.
            first: (rows,) bool, rows that have no state yet.
            tables: of this step, (rows, ...).
            taps: gets the output of each stage, (rows, hidden).

        Returns:
            (rows, hidden) fp32.
        """
        x = self.embedding[tokens]
        size = buffers.kernel_block_size
        table = split_block_table(tables.blocks, buffers.ratio)
        here = table.gather(1, (positions // size)[:, None])[:, 0], positions % size
        table = used_table(table, positions + 1, size)
        for number, layer in enumerate(self.layers):
            x = x + self._mamba(layer, states.state(number), _norm(x), first, tables)
            if taps is not None:
                taps[f"{number}.mamba"] = x
            cache = buffers.keys_and_values(number)
            x = x + self._attention(layer, cache, _norm(x), here, table, positions)
            if taps is not None:
                taps[f"{number}.attention"] = x
        return _norm(x)

    def _mamba(
        self,
        layer: _Layer,
        state: tuple[torch.Tensor, torch.Tensor],
        x: torch.Tensor,
        first: torch.Tensor,
        tables: Tables,
    ) -> torch.Tensor:
        conv, ssm = state
        columns, memory = conv[tables.state_in].float(), ssm[tables.state_in]
        if self.first_step is FirstStep.LOADED:
            columns = torch.where(first[:, None, None], conv[tables.state_out].float(), columns)
            memory = torch.where(first[:, None, None, None], ssm[tables.state_out], memory)
        else:
            columns = torch.where(first[:, None, None], 0, columns)
            memory = torch.where(first[:, None, None, None], 0, memory)
        window = torch.cat([columns, (x @ layer.conv_in)[:, None]], 1)
        mixed = torch.nn.functional.silu((window * layer.conv).sum(1))
        heads, v_dim, k_dim = STATE.ssm_shape
        q, k, v = mixed.split([heads * k_dim, heads * k_dim, heads * v_dim], -1)
        q, k = _norm(q.unflatten(1, (heads, k_dim))), _norm(k.unflatten(1, (heads, k_dim)))
        memory = 0.95 * memory + v.unflatten(1, (heads, v_dim))[..., None] * k[:, :, None]
        after = window[:, 1:].to(conv.dtype)
        if self.first_step is FirstStep.PARTLY_WRITTEN:
            older = torch.where(first[:, None, None], conv[tables.state_out], after)
            after = torch.cat([older[:, :-1], after[:, -1:]], 1)
        conv[tables.state_out] = after
        ssm[tables.state_out] = memory
        return (memory @ q[..., None]).flatten(1) @ layer.ssm_out / k_dim

    def _attention(
        self,
        layer: _Layer,
        cache: tuple[torch.Tensor, torch.Tensor],
        x: torch.Tensor,
        here: tuple[torch.Tensor, torch.Tensor],
        table: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        q, k, v = (x @ layer.qkv).split([HEADS * HEAD_DIM, HEAD_DIM, HEAD_DIM], -1)
        for side, new in zip(cache, (k, v), strict=True):
            bits(side)[here] = bits(new[:, None].to(side.dtype))
        call = Call(q.unflatten(1, (HEADS, HEAD_DIM)).to(self.dtype), *cache, table, positions + 1)
        return self.attend(call).flatten(1).to(x.dtype) @ layer.attn_out


class Zeroing:
    """Decides which blocks are zeroed before which step. This one zeroes none; remedies derive from it.

    :meth:`submit` is called when the host has scheduled a step, :meth:`run` when the device begins it.
    """

    def submit(self, step: Step) -> object:
        """Host side. Returns what :meth:`run` will need."""
        return None

    def run(self, ticket: object) -> Sequence[int] | torch.Tensor:
        """Device side, before the step's forward pass. Returns the ids that were zeroed."""
        return ()


@dataclass(frozen=True)
class Served:
    """The result of a trace served from one memory.

    Attributes:
        outputs: (steps, rows, hidden) fp32.
        zeroed: ids zeroed before each step.
        finite: by stage, (steps, rows) bool; empty without ``watch``.
    """

    outputs: torch.Tensor
    zeroed: list[list[int]]
    finite: dict[str, torch.Tensor]


# Set here as well, because notebooks call `serve` without the question runner.
@torch.inference_mode()
@one_thread()
def serve(
    trace: Trace,
    model: HybridModel,
    buffers: KVBuffers,
    zeroing: Zeroing | None = None,
    *,
    clean: bool = False,
    states: KVBuffers | None = None,
    ahead: int = 0,
    delay: Callable[[], None] = lambda: None,
    watch: bool = False,
) -> Served:
    """Run every step of a trace on one memory.

    Args:
        trace: what was scheduled.
        model: serves it.
        buffers: the memory.
        zeroing: the remedy; by default nothing is zeroed.
        clean: use the clean memory, in which every tenancy has a page of its own.
        states: separate memory for the Mamba layers, instead of the shared pages.
        ahead: steps by which the host may be ahead of the device. On a CPU the device is a queue of this
            length; on CUDA it is the stream.
        delay: enqueued before each step's device work, to make the stream late.
        watch: record after which stages each row was finite.

    Returns:
        Outputs and what was zeroed.

    Raises:
        ValueError: a negative ``ahead``.
    """
    require(ahead >= 0, "ahead", "at least 0 steps", ahead)
    zeroing = zeroing or Zeroing()
    tables = trace.clean if clean else trace.pooled
    on_cuda = buffers.raw[0].is_cuda
    outputs: list[torch.Tensor] = []
    zeroed: list[Sequence[int] | torch.Tensor] = []
    done: list[torch.cuda.Event] = []
    finite: dict[str, list[torch.Tensor]] = {}

    def work(number: int, ticket: object) -> None:
        delay()
        zeroed.append(zeroing.run(ticket))
        now = Tables(tables.blocks[number], tables.state_in[number], tables.state_out[number])
        taps: dict[str, torch.Tensor] | None = {} if watch else None
        outputs.append(
            model.step(
                buffers,
                states or buffers,
                trace.tokens[number],
                trace.positions[number],
                trace.first[number],
                now,
                taps,
            )
        )
        for stage, x in (taps or {}).items():
            finite.setdefault(stage, []).append(x.isfinite().all(-1))

    waiting: list[tuple[int, object]] = []
    for number, step in enumerate(trace.steps):
        # Keep the host at most `ahead` steps in front of the device.
        if on_cuda and number > ahead:
            done[number - ahead - 1].synchronize()
        waiting.append((number, zeroing.submit(step)))
        if on_cuda:
            work(*waiting.pop())
            done.append(torch.cuda.Event())
            done[-1].record()
        elif len(waiting) > ahead:
            work(*waiting.pop(0))
    for left in waiting:
        work(*left)
    ids = [z.tolist() if isinstance(z, torch.Tensor) else list(z) for z in zeroed]
    return Served(torch.stack(outputs), ids, {stage: torch.stack(x) for stage, x in finite.items()})


def corrupted(trace: Trace, served: Served, clean: Served) -> set[int]:
    """Requests with an output that differs in any bit from the same step on clean memory."""
    differs = (bits(served.outputs) != bits(clean.outputs)).any(-1)
    return set(trace.owners[differs].tolist())
