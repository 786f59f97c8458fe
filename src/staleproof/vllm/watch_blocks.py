"""Which KV blocks a step reads while they still hold bytes of another request.

A block of the pool changes hands. Attention loads whole blocks and masks what lies past the tokens, so the
rest of a new block is read before its owner has written it. That is harmless if the kernel masks at the
load and the bytes are of the same format. It is not if the bytes were another layer's state (incident 4).
:class:`staleproof.evidence.TenancyLog` explains one request of a replay; here every block that the scheduler
hands out is looked at once, at a cost that does not grow with the number of requests that run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from staleproof.vllm.watch_owners import Owners

ATTENTION, STATE = "attention", "state"
# vLLM's placeholder where a request needs no block; it is nobody's.
NULL = 0


class Blocks:
    """Counts blocks that are read while they hold another request's bytes.

    A block is looked at when it is handed out. One that a request gets before its tokens reach it, as with
    speculative decoding, is not counted then, nor when they do: the count is too low there, never too high.

    Args:
        kinds: of each group of the KV cache, :data:`ATTENTION` or :data:`STATE`.
        sizes: tokens of a block of each group.

    Attributes:
        stale: (written as, read as) -> blocks; the kinds of the groups of the earlier and the new owner.
        owners: who wrote each block last.

    >>> blocks = Blocks([ATTENTION], [16])
    >>> blocks.step(new=[("a", [[4]], 0, 16)])
    >>> blocks.step(new=[("b", [[4]], 0, 5)], ended=["a"])  # 11 slots still hold what a wrote
    >>> blocks.stale
    Counter({('attention', 'attention'): 1})
    """

    def __init__(self, kinds: Sequence[str], sizes: Sequence[int]) -> None:
        self.kinds, self.sizes = list(kinds), list(sizes)
        self.stale: Counter[tuple[str, str]] = Counter()
        self.owners = Owners()
        # What can be: nothing reads a state before it is written.
        self.pairs = [(kind, ATTENTION) for kind in dict.fromkeys(kinds) if ATTENTION in kinds]
        # Block -> kind of the group that wrote it last.
        self._written: dict[int, str] = {}
        # Request -> blocks of each group that it has been given.
        self._held: dict[str, list[int]] = {}

    def step(
        self,
        new: Iterable[tuple[str, Sequence[Sequence[int]], int, int]] = (),
        more: Iterable[tuple[str, Sequence[Sequence[int]], int, int]] = (),
        ended: Iterable[str] = (),
        zeroed: Iterable[int] = (),
        number: int = 0,
    ) -> None:
        """Take in what the scheduler decided for one step.

        Args:
            new: requests that start, or start again: name, block ids of each group, tokens whose blocks
                came from the prefix cache or another place, tokens of this step.
            more: requests that got further blocks: name, the new ids, tokens computed, tokens of this step.
            ended: requests that have ended since the last step.
            zeroed: blocks that are zeroed before the step.
            number: of the step.
        """
        for name in ended:
            self._held.pop(name, None)
            self.owners.ended(number, name)
        self.owners.zeroed(number, zeroed := [*zeroed])
        for block in zeroed:
            self._written.pop(block, None)
        for name, groups, computed, tokens in new:
            self._held[name] = [0] * len(groups)
            self.owners.begins(number, name)
            self._given(number, name, groups, computed, tokens, first=computed)
        for name, groups, computed, tokens in more:
            self._given(number, name, groups, computed, tokens, first=0)

    def _given(
        self, number: int, name: str, groups: Sequence[Sequence[int]], computed: int, tokens: int, first: int
    ) -> None:
        held = self._held.setdefault(name, [0] * len(groups))
        for group, ids in enumerate(groups[: len(self.kinds)]):
            kind, size = self.kinds[group], self.sizes[group]
            self.owners.given(number, name, group, kind, size, ids, computed, tokens)
            if kind != ATTENTION:
                # A state is written as a whole, and read only after that.
                self._written.update(dict.fromkeys(ids, kind))
                continue
            for at, block in enumerate(ids, held[group]):
                if block == NULL:
                    continue
                if at >= first // size:
                    before = self._written.get(block)
                    whole = computed <= at * size and (at + 1) * size <= computed + tokens
                    reached = at * size < computed + tokens
                    if before is not None and reached and not whole:
                        self.stale[before, kind] += 1
                self._written[block] = kind
            held[group] += len(ids)

    def scheduled(self, output: Any, number: int = 0) -> None:
        """Take in a ``SchedulerOutput`` of vLLM, and the number of its step."""
        cached = output.scheduled_cached_reqs
        given = cached.new_block_ids
        zeroed = getattr(output, "new_block_ids_to_zero", None) or ()
        grown = given.count(None) != len(given)
        tokens = output.num_scheduled_tokens
        new = [
            (one.req_id, one.block_ids, one.num_computed_tokens, tokens.get(one.req_id, 0))
            for one in output.scheduled_new_reqs
        ]
        more: list[tuple[str, Sequence[Sequence[int]], int, int]] = []
        for at, groups in enumerate(given if grown else ()):
            if groups is not None:
                name = cached.req_ids[at]
                one = name, groups, cached.num_computed_tokens[at], tokens.get(name, 0)
                (new if name in cached.resumed_req_ids else more).append(one)
        self.step(new, more, output.finished_req_ids, zeroed, number)


def of(kv_cache_config: Any) -> Blocks:
    """The counter for a ``KVCacheConfig`` of vLLM."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return Blocks(
        [STATE if "Mamba" in type(spec).__name__ else ATTENTION for spec in specs],
        [spec.block_size for spec in specs],
    )
