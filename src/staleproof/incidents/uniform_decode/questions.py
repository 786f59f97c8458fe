"""The questions of incident 8."""

from __future__ import annotations

import math
import textwrap
from typing import Any

from staleproof.grades import Evidence, Grade
from staleproof.incidents.uniform_decode import remedies, whole
from staleproof.incidents.uniform_decode.scene import Part, Request, Rule, Server, by_shape, reference
from staleproof.kernels.vllm_sources import package
from staleproof.lab import Answer, Fix, Incident, bad, good, product
from staleproof.vllm.patches import uniform_decode as patch
from staleproof.vllm.sources import Sources, file_of

incident = Incident("uniform_decode")

OWN, STRANGER, LAST_OWNER, UNWRITTEN = "its own", "a stranger's", "the last owner's", "never written"
# A stranger's tokens, and those of the request that is asked about.
X_TOKENS = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 9.0, 8.0, 7.0, 6.0]
# What the blocks of a request held before it owned them.
OLD_STATE = 40.0
Y_TOKENS = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 1.0, 2.0, 3.0]


def prefill(server: Server, request: Request, tokens: int) -> None:
    """Compute the first tokens of a request in a step of its own that is never a decode."""
    rule, server.rule = server.rule, remedies.never
    server.step([Part(request, tokens)])
    server.rule = rule


def decoded_stranger(server: Server) -> Request:
    """A request that has just verified drafts: its blocks are what the graph's buffers name."""
    stranger = server.request(X_TOKENS, prompt=4)
    prefill(server, stranger, 4)
    server.step([Part(stranger, server.k + 1, server.k)])
    return stranger


def whose(request: Request) -> str:
    """Whose state the outputs of a request come from, by their values."""
    got, tokens = request.outputs, request.tokens[: len(request.outputs)]
    if any(math.isnan(value) for value in got):
        return UNWRITTEN
    if got == reference(tokens):
        return OWN
    return LAST_OWNER if got == reference(tokens, OLD_STATE) else STRANGER


def answer(verdict: str, **numbers: object) -> Answer:
    """Good if the outputs are the request's own."""
    return (good if verdict == OWN else bad)(verdict, **numbers)


PROMPTS = {f"k {k}, {n} tokens": (k, n) for k in range(5) for n in range(1, 7)}


@incident.question(
    "prompt after a stranger",
    PROMPTS,
    expect=dict.fromkeys(PROMPTS, OWN)
    | {
        "k 0, 1 tokens": LAST_OWNER,
        "k 1, 1 tokens": LAST_OWNER,
        "k 1, 2 tokens": STRANGER,
        "k 2, 1 tokens": LAST_OWNER,
        "k 2, 3 tokens": STRANGER,
        "k 3, 1 tokens": LAST_OWNER,
        "k 3, 4 tokens": STRANGER,
        "k 4, 1 tokens": LAST_OWNER,
        "k 4, 5 tokens": STRANGER,
    },
)
def prompt_after_a_stranger(case: tuple[int, int], device: str) -> Answer:
    """A stranger was decoded in the step before. Whose state do the outputs of a prompt come from?

    The blocks of the prompt last held the state of a third request, which nobody clears.
    """
    k, n = case
    server = Server(k, by_shape, device)
    if k:
        decoded_stranger(server)
    request = server.request(Y_TOKENS[:n])
    server.states[request.blocks] = OLD_STATE
    replayed = server.step([Part(request, n)])
    return answer(whose(request), replayed=replayed, outputs=request.outputs)


@incident.question(
    "where the prompt goes",
    ["fresh server", "after a stranger"],
    expect={"fresh server": "nowhere", "after a stranger": "the stranger's blocks"},
)
def where_the_prompt_goes(before: str, device: str) -> Answer:
    """Two drafts, a prompt of three tokens. Which blocks hold its state afterwards?"""
    server = Server(2, by_shape, device)
    stranger = decoded_stranger(server) if before == "after a stranger" else None
    request = server.request(Y_TOKENS[:3])
    states = server.states.clone()
    server.step([Part(request, 3)])
    changed = {*(server.states != states).nonzero().flatten().tolist()}
    if changed and changed <= {*request.blocks}:
        return good("its own blocks")
    if stranger is not None and changed and changed <= {*stranger.blocks}:
        return bad("the stranger's blocks", changed=sorted(changed))
    return bad("nowhere" if not changed else "elsewhere", outputs_unwritten=whose(request) == UNWRITTEN)


@incident.question(
    "running neighbour",
    {"2 tokens": 2, "3 tokens": 3, "4 tokens": 4},
    expect={"2 tokens": OWN, "3 tokens": STRANGER, "4 tokens": OWN},
)
def running_neighbour(n: int, device: str) -> Answer:
    """Two drafts. A prompt joins the step of a running neighbour. Whose are the neighbour's outputs?"""
    server = Server(2, by_shape, device)
    other = decoded_stranger(server)
    neighbour = server.request(Y_TOKENS, prompt=6)
    prefill(server, neighbour, 6)
    server.step([Part(other, 3, 2)])
    replayed = server.step([Part(neighbour, 3, 2), Part(server.request(X_TOKENS[:n]), n)])
    return answer(whose(neighbour), replayed=replayed)


RELEASES = ["0.16.0", "0.22.1", "0.28.0", "0.33.0"]
RELEASED = {f"vLLM {release}, {n} tokens": (release, n) for release in RELEASES for n in (2, 3, 4)}


@incident.question(
    "released rule",
    RELEASED,
    expect={name: "taken for drafts" if n == 3 else "a prompt" for name, (_, n) in RELEASED.items()},
    evidence=lambda case: Evidence(Grade.REAL, f"vLLM {case[0]} GPUModelRunner._is_uniform_decode"),
)
def released_rule(case: tuple[str, int], device: str) -> Answer:
    """Two drafts. What does the release's own function say of one prompt of this length?"""
    release, n = case
    found = Sources(package(release)).function(f"{file_of(patch.RUNNER)}", patch.UNIFORM)
    names: dict[str, Any] = {}
    exec(textwrap.dedent(found.text), names)
    rule = names["_is_uniform_decode"]
    rule = getattr(rule, "__func__", rule)
    # Tokens of the longest request, of a step of drafts, of all requests; requests.
    as_decode = rule(n, 3, n, 1)
    return bad("taken for drafts", place=found.place) if as_decode else good("a prompt", place=found.place)


Way = str
WAYS = ["prompt", "last chunk", "resumed request", "true drafts"]


def outputs_of(way: Way, rule: Rule, device: str) -> Answer:
    """Two drafts. A step of three tokens comes about in one of four ways; whose outputs are these?"""
    server = Server(2, rule, device)
    decoded_stranger(server)
    first = 0 if way == "prompt" else 6
    # A preempted request computes what it had generated again, and so is past its prompt.
    prompt = {"resumed request": 4, "true drafts": 6}.get(way)
    request = server.request(Y_TOKENS[: first + 3], prompt)
    if first:
        prefill(server, request, first)
    drafts = 2 if way == "true drafts" else 0
    replayed = server.step([Part(request, 3, drafts)])
    return answer(whose(request), replayed=replayed)


@incident.question(
    "three tokens",
    WAYS,
    expect={"prompt": STRANGER, "last chunk": STRANGER, "resumed request": STRANGER, "true drafts": OWN},
)
def three_tokens(way: Way, device: str) -> Answer:
    """Two drafts, vLLM's rule. Whose outputs does a step of three tokens give, by how it comes about?"""
    return outputs_of(way, by_shape, device)


def under_a_rule(case: tuple[Way, Rule], device: str) -> Answer:
    """The same under another rule."""
    return outputs_of(*case, device)


def compare(case: tuple[Way, Rule], device: str) -> str | None:
    """What a rule gives up: true drafts must still replay the graph, with right outputs."""
    found = outputs_of("true drafts", case[1], device)
    if found.verdict != OWN:
        return "true drafts give wrong outputs"
    return None if found.numbers["replayed"] else "true drafts no longer replay the graph"


RULES = {
    "whole drafts": remedies.whole_drafts,
    "prompt computed": remedies.prompt_computed,
    "no graph": remedies.never,
}
FIXED = product(RULES, WAYS[:3])
incident.fixes(
    under_a_rule,
    {name: Fix(off=(way, by_shape), on=(way, RULES[rule])) for name, (rule, way) in FIXED.items()},
    compare=compare,
    expect=dict.fromkeys(FIXED, "fixed")
    | {
        "prompt computed, resumed request": "not fixed",
        "no graph, prompt": "wrong",
        "no graph, last chunk": "wrong",
        "no graph, resumed request": "wrong",
    },
)

whole.add(incident)
