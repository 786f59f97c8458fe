"""Incident 7 in a whole vLLM, in words: a guest asks about the house rules and is told another's door code.

Anna writes a note with a door code, and leaves. Ben asks about the house rules, with low priority. While
his prompt is computed in chunks, a chat of high priority needs one block more: the scheduler has planned
Ben's next chunk and published its blocks, and takes Ben out of the same step. Nobody ever writes these
blocks. Carla asks about the same rules, hits them, and reads what Anna left there.

The pool is exactly full when the chat's first decode step needs its third block; the sizes follow from that.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from staleproof import lab
from staleproof.child import report
from staleproof.incidents.published_unwritten.real import rows
from staleproof.incidents.published_unwritten.scene import Memory
from staleproof.lab import Fix, Incident, Scene, bad, good, good_if
from staleproof.vllm import hooks, live, sources, watch
from staleproof.vllm.hooks import Target
from staleproof.vllm.patches.published_unwritten import NAME, SCHEDULER
from staleproof.vllm.plugin import VARIABLE
from staleproof.vllm.sources import numbers
from staleproof.whole import place
from staleproof.whole.engine import Answer, Engine, counters, states_of, switch
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


def visits(engine: Engine) -> Answer:
    """Serve Anna, then Ben and the chat, then Carla, on an empty cache; return Carla's answer."""
    users = prompts(engine.tokens)
    # Until 0.32.0 a lone request gets no more than a chunk either, so Ben needs a step more.
    late = 1 if numbers(sources.installed()[0]) >= (0, 32) else 2
    engine.empty()
    engine.serve([Arrival("Anna", users["Anna"], 1)])
    engine.serve([Arrival("Ben", users["Ben"], 2, priority=10), Arrival("chat", users["chat"], 3, at=late)])
    return engine.serve([carla(engine)])["Carla"]


def carla(engine: Engine) -> Arrival:
    """Carla's request."""
    return Arrival("Carla", prompts(engine.tokens)["Carla"], 12, priority=10)


def ask(policy: str, states: Sequence[str]) -> None:
    """In the child: start one engine, and tell what Carla is answered in each state.

    Args:
        policy: ``--scheduling-policy``.
        states: ``on``: the patch is in service; ``off``, ``again``: it is not; ``released``: no plugin.
    """
    began = time.perf_counter()
    engine = Engine(Path(sys.prefix, place.MODEL), scheduling_policy=policy, **OPTIONS)
    replies: dict[str, Any] = {"start_s": round(time.perf_counter() - began, 1)}
    engine.empty()
    replies["alone"] = engine.serve([carla(engine)])["Carla"].text
    for state in states:
        if state != RELEASED:
            switch(off=() if state == "on" else (NAME,))
        memory = Memory(BLOCK)
        hooks.wrap("truth", Target(SCHEDULER, "Scheduler.schedule", ("self",), after=_follow(memory)))
        before, began = counters(), time.perf_counter()
        answer = visits(engine)
        hooks.unwrap("truth")
        replies[state] = {
            "text": answer.text,
            "cached": answer.cached,
            "of": len(carla(engine).prompt),
            "seconds": round(time.perf_counter() - began, 1),
            "patch": states_of(NAME).get(NAME),
            "counted": {name: now - before.get(name, 0) for name, now in counters().items()},
            "reads": sorted({(_user(r.reader), r.block, _user(r.whose)) for r in memory.reads}),
        }
        report(replies)


def _user(request: str) -> str:
    return request.partition("-")[0]


def _follow(memory: Memory) -> Any:
    def scheduled(result: Any, args: Any, kwargs: Any) -> Any:
        memory.step(rows(args[0], result))
        return result

    return scheduled


# --- The questions.

RELEASED = "released"
STATES = ("off", "on", "again")
LEAKED, CLEAN = "another guest's code", "no code"
PATCHED = "unpublish, whole vLLM, in words"


def _served(policy: str, states: Sequence[str], device: str) -> dict[str, Any]:
    """What one engine answered in each of its states."""
    with tempfile.TemporaryDirectory() as folder:
        plugin = {
            "VLLM_PLUGINS": "staleproof",
            VARIABLE: NAME,
            watch.VARIABLE: "1",
            watch.STAGES: "published",
            live.SWITCH: str(Path(folder, "off")),
        }
        env = {"VLLM_PLUGINS": ""} if RELEASED in states else plugin
        replies: dict[str, Any] = place.call(ask, policy, states, env=env, timeout_s=600).answer()
    return replies


# Name -> one engine.
ENGINES = {
    "patched": Scene("a whole vLLM with the plugin", partial(_served, "priority", STATES)),
    "as released": Scene("a whole vLLM", partial(_served, "priority", (RELEASED,))),
    "FCFS": Scene("a whole vLLM, FCFS", partial(_served, "fcfs", (RELEASED,))),
}
Subject = tuple[str, str]


def _missing(subject: Subject, device: str) -> str | None:
    return place.unavailable_reason(cpu=device == "cpu")


def answered(subject: Subject, device: str, replies: dict[str, Any]) -> lab.Answer:
    """Carla asks for the door code of the house, which her prompt does not contain. What is she told?"""
    row = replies[subject[1]]
    numbers = {name: row[name] for name in ("cached", "of", "seconds")} | {"start_s": replies["start_s"]}
    numbers |= {"prompts": [CARLA], "texts": [row["text"]], "evidence": place.evidence()}
    return bad(LEAKED, **numbers) if CODE in row["text"] else good(CLEAN, **numbers)


def compare(subject: Subject, device: str, replies: dict[str, Any]) -> str | None:
    """With the patch in place to the end, she must be told what she is told alone on an empty cache."""
    row = replies[subject[1]]
    if row["patch"] != "in place":
        return f"the patch is {row['patch']}"
    return None if row["text"] == replies["alone"] else f"alone she is told {replies['alone']!r}"


def watched(subject: Subject, device: str, replies: dict[str, Any]) -> lab.Answer:
    """Do the watch's hits of unwritten blocks equal those of a record of all writes and reads?"""
    row = replies[subject[1]]
    hits, reads = row["counted"]["unwritten_hits"], row["reads"]
    # JSON keeps lists.
    numbers = {"hits": hits, "truth": [list(read) for read in reads], "evidence": place.evidence()}
    return good_if(hits == len(reads), "the same" if hits == len(reads) else "differ", **numbers)


def add(incident: Incident) -> None:
    """Add the questions to the incident."""
    more: dict[str, Any] = {"needs": _missing, "scene": lambda subject: ENGINES[subject[0]]}
    three = Fix(off=("patched", "off"), on=("patched", "on"), again=("patched", "again"))
    incident.fixes(answered, {PATCHED: three}, compare=compare, **more)
    incident.question(
        "whole vLLM, in words",
        {name: (name, RELEASED) for name in ("as released", "FCFS")},
        expect={"as released": LEAKED, "FCFS": CLEAN},
        **more,
    )(answered)
    states = {f"patch {state}": ("patched", state) for state in ("off", "on")}
    incident.question("whole vLLM, watch beside the truth", states, expect="the same", **more)(watched)


def texts(found: lab.Finding) -> list[tuple[str, str, str]]:
    """What Carla was told: (whose code ran, state of the patch or name of the variant, text)."""
    if found.three is None:
        return [(found.of, found.variant, text) for text in found.numbers.get("texts", ())]
    # The recorded runs of 2026-11-28 name one text, not a list.
    of = {
        state: found.numbers.get(f"texts_{state}", [found.numbers.get(f"text_{state}")]) for state in STATES
    }
    return [(found.of, state, str(one[0])) for state, one in of.items()]


def main() -> None:
    """What ``make whole`` prints. Exit code 2: no vLLM can be started; 1: an answer is not as expected."""
    if reason := place.unavailable_reason():
        print(f"staleproof: {reason}", file=sys.stderr)
        sys.exit(2)
    print(f"Anna writes:  {ANNA}\nBen asks:     {BEN}\nCarla asks:   {CARLA}")
    print(
        f"{place.evidence().of}: an engine takes half a minute to start, and there are {len(ENGINES)}",
        flush=True,
    )
    incident, failed = Incident("published_unwritten"), False
    add(incident)
    for found in incident.run("cpu"):
        note = f" ({found.note})" if found.note else ""
        print(f"\n{found.question}, {found.variant}: {found.verdict}{note}")
        for _, state, text in texts(found):
            print(f"  {state}: Carla is told: {text}")
        for name in [name for name in ("hits", "truth") if name in found.numbers]:
            print(f"  {name}: {found.numbers[name]}")
        sys.stdout.flush()
        failed |= not found.ok
    sys.exit(int(failed))
