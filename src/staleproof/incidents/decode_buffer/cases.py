"""The cases of incident 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from staleproof.cases.case import Reading, Scene, ablation, each, fix, reading
from staleproof.cases.finding import Evidence, Grade
from staleproof.cases.run import Table
from staleproof.device import Provenance
from staleproof.evidence.ledger import size_text
from staleproof.incidents.decode_buffer import buffer
from staleproof.incidents.decode_buffer.allocator import GIB, oom_fields
from staleproof.incidents.decode_buffer.correct import wrong
from staleproof.incidents.decode_buffer.released import ROWS, Released, profiled
from staleproof.incidents.decode_buffer.scene import DIES, LIVES, Outcome
from staleproof.incidents.decode_buffer.setups import (
    ATTENTION,
    MAX_NUM_SEQS,
    OFF,
    REPORT,
    SETUPS,
    SMALL,
    ServerCase,
    run_servers,
)
from staleproof.kernels.vllm_sources import package

# --- A whole server. Real memory on CUDA, under a limit; simulated on a CPU.


def too_small(case: ServerCase, device: str) -> str | None:
    """Why this device cannot hold the server of ``case``, or ``None``."""
    if device != "cuda":
        return None
    if case.config is None:
        # The bytes outside the report's plan, a gibibyte each for weights and KV cache, and the peak.
        wanted = int(18.4 * GIB) + 2 * REPORT.workspace_bytes + 2 * GIB
    else:
        wanted = case.config.total_bytes
    free = torch.cuda.mem_get_info()[0]
    if free >= wanted:
        return None
    return f"needs {size_text(wanted)} of free GPU memory, {size_text(free)} is free"


def server(case: ServerCase, device: str, started: Sequence[Outcome] = ()) -> Reading:
    """Whether a server dies; ``started`` holds its outcome if it was started already."""
    outcome = started[0] if started else run_servers([case], device)[0]
    numbers: dict[str, Any] = {
        "died_in": outcome.died_in,
        "kv_bytes": outcome.kv_bytes,
        "peak_bytes": outcome.peak_bytes,
        **{f"oom_{name}": text for name, text in oom_fields(outcome.error or "").items()},
    }
    if outcome.verdict == LIVES:
        grew = outcome.usages["serve"].allocated - outcome.usages["capture"].allocated
        numbers["grew_while_serving_bytes"] = grew
    return reading(outcome.verdict, **numbers)


SERVERS = {name: ServerCase(name) for name in SETUPS}
# Each starts twice: without and with a ledger.
STARTS = {
    name: Scene(f"servers, {name}", partial(run_servers, [case, replace(case, watched=True)]))
    for name, case in SERVERS.items()
}


def ledger(case: ServerCase, device: str, started: Sequence[Outcome]) -> Reading:
    """Whether the ledger says before the first request that the server will die."""
    watched = started[1]
    report = watched.ready
    assert report is not None
    return reading(
        "fits" if report.fits else "will not fit",
        note=report.sentence,
        owners=[owner.name for owner in report.surprises],
        headroom_bytes=report.headroom,
        then=watched.verdict,
    )


def profile(case: ServerCase, device: str, started: Sequence[Outcome]) -> Reading:
    """How much of the kept memory was already allocated in the profile run."""
    watched = started[1]
    assert watched.ready is not None
    late = sum(owner.predicted for owner in watched.ready.surprises)
    early = watched.kept_bytes - sum(owner.bytes for owner in watched.ready.surprises)
    verdict = "unseen" if late else "seen" if early else "nothing kept"
    return reading(verdict, buffers=(late + early) / SMALL.decode_out_bytes)


# The report's own size: 61 x (2048, 128, 512) bf16, then a prefill that asks for 3.94 GiB. On CUDA the
# server leaves as many bytes outside its plan as the report's; elsewhere it is simulated on the report's
# 184 GiB. "buffers only" has no transient memory between the buffers, so decoding takes only the buffers.
TRUE_SIZE = {
    OFF: ServerCase(OFF, None, watched=True),
    f"{OFF}, batch {MAX_NUM_SEQS}": ServerCase(OFF, None, {"batch": MAX_NUM_SEQS}),
    "decode_workspace": ServerCase("decode_workspace", None),
    "clear_empty_rows": ServerCase("clear_empty_rows", None),
    f"{OFF}, buffers only": ServerCase(OFF, None, {"workspace_per_token": 64}, watched=True),
}
_BUFFERS_ONLY = Scene("buffers only", partial(run_servers, [TRUE_SIZE[f"{OFF}, buffers only"]]))


def true_size(case: ServerCase, device: str, started: Sequence[Outcome] = ()) -> Reading:
    """Whether a server of the report's own size dies, and the bytes that decoding took from the device."""
    started = started or run_servers([case], device)
    said = server(case, device, started)
    return replace(said, numbers={**said.numbers, "taken_bytes": started[0].taken_bytes()})


def prediction(case: ServerCase, device: str, started: Sequence[Outcome]) -> Reading:
    """How far the ledger's prediction after one layer is from the bytes that all layers took."""
    (outcome,) = started
    assert outcome.probed is not None
    owner = outcome.probed.surprises[0]
    taken = outcome.taken_bytes()
    verdict = "within 1 %" if abs(taken / owner.predicted - 1) <= 0.01 else "off"
    return reading(verdict, note=str(owner), predicted_bytes=owner.predicted, taken_bytes=taken)


# vLLM's own profile run, and what its first decode keeps. Most changes remove one of the five steps.
_EAGER = Released("0.18.1", "CUTLASS")
_DECODE = (("uniform_decode", True), ("num_tokens", ROWS))
RELEASED: dict[str, tuple[Released, str]] = {
    "vLLM 0.18.1, CUTLASS": (_EAGER, "unseen"),
    "vLLM 0.18.1, FlashInfer": (Released("0.18.1", "FlashInfer"), "unseen"),
    "vLLM 0.18.1, metadata built": (replace(_EAGER, change=(("force_attention", True),)), "seen"),
    # A batch as large as the profile's is larger than every graph, whether it is a profile or not.
    "vLLM 0.18.1, not as a profile": (replace(_EAGER, change=(("is_profile", False),)), "unseen"),
    "vLLM 0.18.1, a batch that fits a graph": (replace(_EAGER, change=_DECODE), "unseen"),
    "vLLM 0.18.1, both": (replace(_EAGER, change=(*_DECODE, ("is_profile", False))), "seen"),
    "vLLM 0.19.1, CUTLASS": (Released("0.19.1", "CUTLASS"), "unseen"),
    "vLLM 0.19.1, FlashInfer": (Released("0.19.1", "FlashInfer"), "unseen"),
    "vLLM 0.20.0, CUTLASS": (Released("0.20.0", "CUTLASS"), "nothing kept"),
    "vLLM 0.20.0, FlashInfer": (Released("0.20.0", "FlashInfer"), "nothing kept"),
}


def profile_released(case: tuple[Released, str], device: str) -> Reading:
    """Whether a release's own profile run makes the buffer that its first captured decode keeps."""
    said = profiled(case[0], package(case[0].version))
    early, late = said["kept_by_profile"], said["kept_by_capture"]
    verdict = "seen" if early else "unseen" if late else "nothing kept"
    # vLLM's code runs on the CPU even if there is a GPU.
    return Reading(verdict, said, provenance=None if device == "cpu" else Provenance.INTERPRETED)


LARGEST_GRAPH = {
    f"{rows} rows": ServerCase(OFF, changes={"batch": rows}) for rows in (16, 32, 48, SMALL.batch)
}


_BUFFERS = {name: SETUPS[name] for name in ATTENTION}
# One step of all layers in turn; two questions use it.
_IN_TURN = {
    name: Scene(f"layers in turn, {name}", partial(buffer.in_turn, setup)) for name, setup in _BUFFERS.items()
}


def _expect(question: str) -> dict[str, str]:
    return {name: setup.expect[question] for name, setup in SETUPS.items() if question in setup.expect}


_FITS = {name: "will not fit" if said == DIES else "fits" for name, said in _expect("server").items()}
# Each variant in a whole server, under the ledger.
STARTED = Table(
    "decode_buffer",
    *(
        each(
            name, name, SERVERS, ask, expect=expect, needs=too_small, scene=lambda case: STARTS[case.variant]
        )
        for name, ask, expect in (
            ("server", server, _expect("server")),
            ("ledger", ledger, _FITS),
            ("profile", profile, _expect("profile")),
        )
    ),
)

TABLE = Table(
    "decode_buffer",
    STARTED.cases,
    *(
        fix(
            name, "server", off=ServerCase(OFF), on=ServerCase(name), ask=server, wrong=wrong, needs=too_small
        )
        for name, setup in SETUPS.items()
        if setup.fix
    ),
    ablation(
        ServerCase(OFF),
        "server",
        without={
            "not kept": ({"variant": "no_buffer"}, LIVES),
            "one for all layers": ({"variant": "module_singleton"}, LIVES),
            "made before the profile": ({"variant": "zeros_before_profile"}, LIVES),
            "a quarter of the batch": ({"changes": {"batch": SMALL.batch // 4}}, LIVES),
        },
        ask=server,
        expect=DIES,
        needs=too_small,
    ),
    each(
        "true_size",
        "server",
        TRUE_SIZE,
        true_size,
        expect={name: DIES if name == OFF else LIVES for name in TRUE_SIZE},
        needs=too_small,
        scene=lambda case: _BUFFERS_ONLY if case is TRUE_SIZE[f"{OFF}, buffers only"] else None,
    ),
    each(
        "prediction",
        "arithmetic",
        {OFF: TRUE_SIZE[f"{OFF}, buffers only"]},
        prediction,
        expect="within 1 %",
        needs=too_small,
        scene=_BUFFERS_ONLY,
    ),
    each(
        "profile, released",
        "profile",
        RELEASED,
        profile_released,
        expect=lambda case: case[1],
        evidence=lambda case: Evidence(Grade.REAL, f"vLLM {case[0].version}'s runner and backend on a CPU"),
    ),
    each(
        "largest graph",
        "server",
        LARGEST_GRAPH,
        server,
        expect=lambda case: DIES if case.changes["batch"] == SMALL.batch else LIVES,
        needs=too_small,
    ),
    *(
        each(name, words, _BUFFERS, ask, expect=_expect(name))
        for name, words, ask in (
            ("overlap", "layers", buffer.overlap),
            ("other_model", "shape", buffer.other_model),
            ("growth", "buffer", buffer.growth),
            ("empty_rows", "empty rows", buffer.empty_rows),
        )
    ),
    each(
        "layers in turn",
        "layers",
        list(_BUFFERS),
        buffer.layers_in_turn,
        expect="separate",
        scene=_IN_TURN.__getitem__,
    ),
    each(
        "in empty rows",
        "empty rows",
        list(_BUFFERS),
        buffer.in_empty_rows,
        expect=_expect("in empty rows"),
        reason=buffer.POOL,
        scene=_IN_TURN.__getitem__,
    ),
)
