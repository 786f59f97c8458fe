"""The questions of incident 8."""

from __future__ import annotations

import contextlib
import math
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from staleproof.grades import Evidence, Grade
from staleproof.incidents.uniform_decode import one_token, released, remedies, whole
from staleproof.incidents.uniform_decode.scene import Part, Request, Rule, Server, by_shape, reference
from staleproof.kernels.vllm_sources import package
from staleproof.lab import Answer, Fix, Incident, bad, good, product
from staleproof.vllm.patches import uniform_decode as patch
from staleproof.vllm.plugin import patches
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

# How drafts are made, by the name of vLLM's option.
METHODS = {"no drafts": None, "MTP": "mtp", "n-grams": "ngram", "suffix": "suffix"}
CHOICES = {
    f"vLLM {release}, {name}": (release, method)
    for release in ("0.22.1", "0.28.0", "0.29.0", "0.33.0")
    for name, method in METHODS.items()
}
SECOND = {
    *("vLLM 0.29.0, no drafts", "vLLM 0.29.0, MTP"),
    *("vLLM 0.33.0, no drafts", "vLLM 0.33.0, MTP", "vLLM 0.33.0, n-grams"),
}


@incident.question(
    "model runner by default",
    CHOICES,
    expect={name: "V2" if name in SECOND else "V1" for name in CHOICES},
    evidence=lambda subject: Evidence(Grade.REAL, f"vLLM {subject[0]} VllmConfig.use_v2_model_runner"),
)
def model_runner_by_default(subject: tuple[str, str | None], device: str) -> Answer:
    """Which runner does the release's own choice give Qwen3-Next? V2 knows prompts from 0.28.0 on."""
    runner = released.model_runner(*subject)
    return good(runner) if runner == "V2" else bad(runner)


# --- The releases' own dispatcher, builders and kernels.


class Load(NamedTuple):
    """What a release serves in :func:`released_server`.

    Attributes:
        serve: serves it; returns the server, and the request whose outputs are looked at.
        patches: names of the patches that mend it.
    """

    serve: Callable[[], tuple[released.Server, released.Served]]
    patches: tuple[str, ...] = ("uniform_decode",)


def _server(layer: released.Gdn | released.Bailing, graphs: bool = True) -> released.Server:
    """A server whose step before was a decode of a stranger, which has six tokens in its state."""
    server = released.Server(layer, graphs)
    stranger = server.request(X_TOKENS, prompt=6)
    server.prefill(stranger, 6)
    server.step([(stranger, server.k + 1, server.k)])
    return server


def _behind_a_stranger(
    n: int, computed: int = 0, prompt: int | None = None, drafts: int = 0
) -> tuple[released.Server, released.Served]:
    """A step of ``n`` tokens of one request, behind ``computed`` ones, then a decode of two drafts."""
    server = _server(released.Gdn(2))
    request = server.request(Y_TOKENS[: computed + n + 3], computed + n if prompt is None else prompt)
    if computed:
        server.prefill(request, computed)
    server.step([(request, n, drafts)])
    server.step([(request, 3, 2)])
    return server, request


def _beside_a_neighbour() -> tuple[released.Server, released.Served]:
    """A prompt of three tokens joins the step of a running neighbour, who is looked at."""
    server = _server(released.Gdn(2))
    neighbour = server.request(Y_TOKENS, prompt=6)
    server.prefill(neighbour, 6)
    server.step([(neighbour, 3, 2), (server.request(X_TOKENS[:3]), 3, 0)])
    return server, neighbour


def _one_token(
    layer: released.Gdn | released.Bailing, graphs: bool
) -> tuple[released.Server, released.Served]:
    """A prompt of one token, in a block that holds another user's state, then a decode; no drafts."""
    server = _server(layer, graphs)
    request = server.request(Y_TOKENS[:2], prompt=1)
    _, left = layer.reference(X_TOKENS[:5])
    for states, state in zip(layer.states, left, strict=True):
        states[request.blocks[0]] = state
    for _ in range(2):
        server.step([(request, 1, 0)])
    return server, request


BOTH = "uniform_decode", "one_token_prompt"
LOADS = {
    "prompt of 2": Load(lambda: _behind_a_stranger(2)),
    "prompt of 3": Load(lambda: _behind_a_stranger(3)),
    "prompt of 4": Load(lambda: _behind_a_stranger(4)),
    "resumed request": Load(lambda: _behind_a_stranger(3, 6, 4)),
    "true drafts": Load(lambda: _behind_a_stranger(3, 6, 6, 2)),
    "running neighbour": Load(_beside_a_neighbour),
    "prompt of 1, graphs": Load(lambda: _one_token(released.Gdn(0), True), BOTH),
    "prompt of 1, no graphs": Load(lambda: _one_token(released.Gdn(0), False), BOTH),
    "prompt of 1, Ling": Load(lambda: _one_token(released.Bailing(), False), BOTH),
}
# Release, load, whether the patches are in place.
Subject = tuple[str, str, bool]
NEWEST = "0.33.0"
ONE = "prompt of 1, no graphs"
RELEASED_LOADS = {
    f"vLLM {version}, {load}": (version, load, False)
    for version, loads in {
        "0.22.1": ("prompt of 2", "prompt of 3", "running neighbour", ONE),
        # The last of GDN's older builder is 0.30.0.
        "0.28.0": ("prompt of 3", "running neighbour", ONE),
        NEWEST: LOADS,
    }.items()
    for load in loads
}
RIGHT = "prompt of 2", "prompt of 4", "true drafts"
MENDED = {
    "0.22.1": ("running neighbour",),
    "0.28.0": (ONE,),
    NEWEST: ("resumed request", "prompt of 1, graphs", "prompt of 1, Ling"),
}


def _interpreted(subject: Subject, device: str) -> str | None:
    return None if device == "cpu" else "its kernels run in Triton's interpreter, on a CPU"


def _ran(subject: Subject) -> Evidence:
    return Evidence(Grade.REAL, f"vLLM {subject[0]} dispatcher, builder and kernels")


def released_server(subject: Subject, device: str) -> Answer:
    """A release's own dispatcher, builder and kernels serve a request. Are its outputs its own?"""
    version, load, patched = subject
    with contextlib.ExitStack() as stack:
        stack.enter_context(released.release(version))
        for name in LOADS[load].patches if patched else ():
            stack.enter_context(patches()[name].applied(version))
        server, request = LOADS[load].serve()
        error = server.error(request)
    # The step before is a stranger's decode.
    numbers = {"mode": server.modes[1], "error": error}
    if math.isnan(error):
        return bad(UNWRITTEN, **numbers)
    return good(OWN, **numbers) if error <= released.ROUNDING else bad(whole.OTHER, **numbers)


incident.question(
    "released server",
    RELEASED_LOADS,
    expect={
        name: OWN if load in RIGHT or (version, load) == (NEWEST, ONE) else whole.OTHER
        for name, (version, load, _) in RELEASED_LOADS.items()
    },
    needs=_interpreted,
    evidence=_ran,
)(released_server)


def compare_released(subject: Subject, device: str) -> str | None:
    """With the patches true drafts must replay the graph, with the outputs of the reference."""
    found = released_server((subject[0], "true drafts", True), device)
    return None if found.verdict == OWN and found.numbers["mode"] == "FULL" else f"drafts: {found}"


incident.fixes(
    released_server,
    {
        f"{', '.join(LOADS[load].patches)}, vLLM {version}, {load}": Fix(
            (version, load, False), (version, load, True)
        )
        for version, loads in MENDED.items()
        for load in loads
    },
    compare=compare_released,
    needs=_interpreted,
    evidence=_ran,
)

whole.add(incident)
one_token.add(incident)
