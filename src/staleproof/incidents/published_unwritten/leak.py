"""Incident 7 in a whole vLLM, in words: a guest asks about the house rules and is told another's door code.

Anna writes a note with a door code, and leaves. Ben asks about the house rules, with low priority. While
his prompt is computed in chunks, a chat of high priority needs one block more: the scheduler has planned
Ben's next chunk and published its blocks, and takes Ben out of the same step. Nobody ever writes these
blocks. Carla asks about the same rules, hits them, and reads what Anna left there.

The pool is exactly full when the chat's first decode step needs its third block; the sizes follow from that.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from staleproof.cases.children import tell
from staleproof.incidents.published_unwritten.real import rows
from staleproof.incidents.published_unwritten.scene import Memory
from staleproof.vllm import hooks, sources
from staleproof.vllm.hooks import Target
from staleproof.vllm.patches.published_unwritten import SCHEDULER
from staleproof.vllm.sources import numbers
from staleproof.whole.load import Arrival

CODE = "7391"
RULES = (
    "These are the house rules for our guests. Please take off your shoes at the door. Breakfast is served "
    "from seven to ten in the kitchen. The garden is open all day, and the pool closes at nine. Do not smoke "
    "in the rooms. Bring the towels back to the bathroom. Put the bottles into the green box and the paper "
    "into the blue box. Please be quiet after ten. The bus to the town leaves every hour from the church. "
)
# Blocks are used again in reverse order, so each 32 tokens of the note name the code.
ANNA = (
    f"Hello, this is Anna Berg. The door code of my house is {CODE}. My sister comes on Friday; tell her "
    f"that the door code is {CODE}. The cleaner comes on Monday; tell him that the door code is {CODE}. "
    f"Nobody else may know it. The door code is {CODE}. And please buy milk. Again, the door code is {CODE}. "
    f"Thank you. Anna Berg, door code {CODE}. "
)
BEN, CARLA = "When is breakfast served?", "What is the door code of the house?"
CHAT = (
    "<|im_start|>user\nSay hello to everybody in the room, please, and tell them a long story about a dog, a "
    "cat, a bird and the sea.<|im_end|>\n<|im_start|>assistant\n"
)
BLOCK, CHUNK = 32, 64
# Ben's first chunk is a lone request's, CHUNK + 64 tokens. Two of CHUNK follow; the last one is withdrawn.
LENGTH = 3 * CHUNK + 64
BLOCKS = LENGTH // BLOCK + 2
OPTIONS = {
    "dtype": "float32", "block_size": BLOCK, "max_model_len": BLOCKS * BLOCK, "max_num_seqs": 4,
    # One block more: vLLM keeps the null block for itself.
    "num_gpu_blocks_override": BLOCKS + 1, "enable_prefix_caching": True,
    "long_prefill_token_threshold": CHUNK, "max_num_batched_tokens": CHUNK + 64,
}  # fmt: skip


def prompts(tokens: Any) -> dict[str, list[int]]:
    """Name -> tokens of each user's prompt; ``tokens`` makes tokens of a text."""

    def about(question: str) -> list[int]:
        rules: list[int] = tokens("<|im_start|>user\n" + 8 * RULES)[:LENGTH]
        end: list[int] = tokens(
            f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )
        return rules + end

    chat = (tokens(CHAT) + tokens(9 * "Hello, everybody in the room. "))[: 2 * BLOCK]
    return {
        "Anna": tokens("<|im_start|>user\n" + ANNA),
        "Ben": about(BEN),
        "Carla": about(CARLA),
        "chat": chat,
    }


def ask(policy: str, states: Sequence[str]) -> None:
    """In the child: start one engine, and tell what Carla is answered in each state.

    Args:
        policy: ``--scheduling-policy``.
        states: ``off``, ``on``, ``again``: the patch ``unpublish`` is out of service, or in service;
            ``none``: the plugin is not loaded.
    """
    from staleproof.whole.engine import Engine, counters, states_of, switch
    from staleproof.whole.place import MODEL

    began = time.perf_counter()
    engine = Engine(Path(sys.prefix, MODEL), scheduling_policy=policy, **OPTIONS)
    told: dict[str, Any] = {"start_s": round(time.perf_counter() - began, 1)}
    users = prompts(engine.tokens)
    # Until 0.32.0 a lone request gets no more than a chunk either, so Ben needs a step more.
    late = 1 if numbers(sources.installed()[0]) >= (0, 32) else 2
    for state in states:
        if state != "none":
            switch(off=() if state == "on" else ("unpublish",))
        memory = Memory(BLOCK)
        target = Target(SCHEDULER, "Scheduler.schedule", ("self",), after=_follow(memory))
        hooks.wrap("truth", target)
        before, began = counters(), time.perf_counter()
        engine.empty()
        engine.serve([Arrival("Anna", users["Anna"], 1)])
        engine.serve(
            [Arrival("Ben", users["Ben"], 2, priority=10), Arrival("chat", users["chat"], 3, at=late)]
        )
        carla = engine.serve([Arrival("Carla", users["Carla"], 12, priority=10)])["Carla"]
        hooks.unwrap("truth")
        told[state] = {
            "text": carla.text,
            "cached": carla.cached,
            "of": len(users["Carla"]),
            "seconds": round(time.perf_counter() - began, 1),
            "patch": states_of("unpublish"),
            "counted": {name: now - before.get(name, 0) for name, now in counters().items()},
            "reads": sorted({(r.reader, r.block, r.whose) for r in memory.reads}),
        }
        tell(told)


def _follow(memory: Memory) -> Any:
    def scheduled(result: Any, args: Any, kwargs: Any) -> Any:
        memory.step(rows(args[0], result))
        return result

    return scheduled
