"""What each patch of an installed vLLM costs a decode step: vLLM's function in place, without it and with.

vLLM's files run as they are, in the places they have there (`staleproof.kernels.vllm_sources`), and the
patch wraps them as the plugin does, so that its wrapper is timed too. Each row names the release whose
files ran (``vllm``), whether the patch is needed there (``needed``) and where it applies
(``applies_to``). A patch that the installed release does not need is timed on the files of
:data:`OLDER`, if ``STALEPROOF_VLLM_CACHE`` has them (``<version>/vllm``, as the tests fetch them).

``STALEPROOF_VLLM_MOE_SO`` names the compiled ``_moe_C`` library of a vLLM wheel (0.20.2 was meant),
which serves both releases; without it the routing rows are left out. Rows named "host" are time of the
calling thread, not of the device.

Not timed: ``decode_buffer`` (its kernels need SM100), ``dummy_slots`` and ``routing_simulator`` (no
part of a real step), ``mla_zeroing`` (it zeroes what vLLM leaves out; see ``BlockZeroer.zero``).

Run: ``python benchmarks/patches.py`` on a machine with a CUDA device and an importable vllm folder.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from staleproof import device

device.select()

from staleproof.cases import measure
from staleproof.kernels import vllm_calls
from staleproof.kernels.vllm_calls import OPS, applies_to, mla_call, zeroer
from staleproof.kernels.vllm_sources import UnavailableError, executed, load
from staleproof.vllm import standing
from staleproof.vllm.patches import kv_reuse, mla_padding, moe_routing, scale_padding
from staleproof.vllm.releases import table
from staleproof.vllm.sources import file_of, vllm_file

# Imported by name, so that the source digest of a recorded row covers them.
PARTS = (kv_reuse, mla_padding, moe_routing, scale_padding)
PATCHES = {patch.name: patch for part in PARTS for patch in part.PATCHES}
VERSION, OLDER = "0.20.2", "0.19.1"
# vllm.envs, because a patch that torch.compile traces adds itself to the compile-cache key there.
OLDER_FILES = (OPS, "vllm.envs")
FILES = (
    *(vllm_calls.TRITON_MLA, vllm_calls.DECODE_ATTENTION, vllm_calls.WORKER, vllm_calls.EXPERTS),
    *vllm_calls.SCHEDULING,
    *OLDER_FILES,
)
BATCH, HEADS, CONTEXT = 128, 128, 512
# A host's speed drifts, so it is timed without the patch and with it in turns, and the median turn counts.
HOST_TURNS, HOST_ROUNDS = 5, 20
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One function of vLLM that a patch wraps.

    Attributes:
        patch: its name.
        mode: what is called, in words.
        calls: makes the closures to time, one an input set.
        moved: fewest bytes a call must move.
        host: whether the calling thread is timed, not the device.
        result: what a call did, if that is not what it returns; undoes it.
        library: whether it needs vLLM's compiled library.
        cache: where the inputs are before a call.
    """

    patch: str
    mode: str
    calls: Callable[[], list[Call]]
    moved: int = 0
    host: bool = False
    result: Call | None = None
    library: bool = False
    cache: str = measure.WARM


def routing(patch: str, name: str, experts: int, top_k: int, biased: bool) -> Iterator[Case]:
    """One routing op, on the device and on the host. Its logits come from the layer before: warm."""
    bias = torch.randn(experts, device="cuda") if biased else None
    words = f"{name}, {experts} experts, top {top_k}" + ", bias" * biased

    def calls() -> list[Call]:
        return [vllm_calls.topk_call(name, BATCH, experts, top_k, bias)]

    moved = BATCH * experts * 2 + BATCH * top_k * 8
    yield Case(patch, words, calls, moved, library=True)
    yield Case(patch, f"host: {words}", calls, host=True, library=True)


def older_cases(version: str) -> Iterator[Case]:
    """Patches that the installed release does not need; on its files if there are no others."""
    yield from routing("topk_nan", "topk_softmax", 128, 8, biased=False)
    if version == OLDER:
        ops, where = vllm_calls.import_ops(), torch.device("cuda")

        def scales(rows: int, compiled: bool) -> Call:
            def made() -> torch.Tensor:
                return ops.create_fp4_scale_tensor(rows, 7168, where, True)

            # The patch zeroes memory in graphs only. It is traced again when vLLM's function is exchanged.
            call = torch.compile(made, backend="eager", fullgraph=True) if compiled else made
            return lambda: call().shape

        for rows, words in ((BATCH, "no padding"), (BATCH - 28, "28 rows of padding")):
            for compiled in (False, True):
                yield Case(
                    "scale_padding",
                    f"create_fp4_scale_tensor, {rows} x 7168, {words}" + ", compiled" * compiled,
                    lambda rows=rows, compiled=compiled: [scales(rows, compiled)],
                    rows * 7168 // 16,
                )


def cases() -> Iterator[Case]:
    """Patches that the installed release needs."""

    def attention() -> list[Call]:
        turns = measure.rotation(100 * CONTEXT * 576 * 2)
        made = [mla_call(BATCH, 100, HEADS, CONTEXT)[0] for _ in range(turns.sets)]
        return [lambda call=call: call()[0][:100] for call in made]

    yield Case(
        "mla_padding",
        f"Triton MLA, 100 live, {CONTEXT} tokens",
        attention,
        BATCH * HEADS * 512 * 2,
        cache=measure.COLD,
    )
    yield from routing("topk_nan_bias", "topk_softmax", 256, 8, biased=True)
    yield from routing("topk_nan_bias", "topk_sigmoid", 256, 8, biased=True)
    yield from routing("topk_nan_bias", "grouped_topk", 256, 8, biased=True)
    yield from routing("hash_topk_nan", "topk_hash_softplus_sqrt", 256, 6, biased=True)
    if importlib.util.find_spec("flashinfer") is not None:
        # FlashInfer sorts the slots of the first batch in one block, where repeated experts do no harm.
        for rows, words in ((BATCH, ""), (4 * BATCH, f", {4 * BATCH} rows")):
            experts, given = vllm_calls.experts_call(rows, 8)
            # The copy that stands for FlashInfer's kernel is timed in both rows.
            words = f"FlashInferExperts.apply, its kernel a copy, top 8{words}"
            for mode, host in ((words, False), (f"host: {words}", True)):
                yield Case(
                    "duplicate_experts",
                    mode,
                    lambda experts=experts: [experts],
                    0 if host else rows * 8 * 16,
                    host=host,
                    result=lambda given=given: {name: x.clone() for name, x in given.items()},
                )
    made, caches = zeroer()

    def zeroed() -> list[int]:
        blocks = [b for b in range(64) if not any(int(c[:, b].count_nonzero()) for c in caches)]
        for cache in caches:
            cache.fill_(1)
        return blocks

    for count in (1, 30):
        yield Case(
            "staging_race",
            f"host: zero {count} blocks of 28 layers",
            lambda n=count: [lambda: made.zero_block_ids([*range(1, n + 1)])],
            host=True,
            result=zeroed,
        )
    for patch in ("undrained_ids", "mla_recording"):
        yield Case(
            patch, "host: schedule() of 64 requests", lambda: [vllm_calls.schedule_call(64)], host=True
        )


def vllm_root() -> Path:
    """Find the folder ``vllm`` of an importable vLLM whose files run here.

    Raises:
        UnavailableError: there is none, or its files do not load.
    """
    init = vllm_file("__init__.py")
    if init is None or not all(vllm_file(file_of(name)) for name in FILES):
        raise UnavailableError("no importable vllm folder with its MLA, zeroer, scheduler and ops")
    # Not the ops: loading them registers operators, which a process can do once.
    load(init.parent, *(name for name in FILES if name != OPS))
    return init.parent


def older_root() -> Path | None:
    """The folder ``vllm`` of :data:`OLDER`, if it was fetched."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "staleproof/vllm"
    root = Path(os.environ.get("STALEPROOF_VLLM_CACHE", default)) / OLDER / "vllm"
    return root if all((root / file_of(name)).is_file() for name in OLDER_FILES) else None


def outcome(case: Case, call: Call) -> Any:
    """What one call did: a copy of its result, whose tensors are then overwritten."""
    value = call()
    return _taken(case.result() if case.result else value)


def _taken(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        copy = value.clone()
        value.fill_(torch.nan if value.is_floating_point() else -7)
        return copy
    if isinstance(value, tuple | list):
        return [_taken(one) for one in value]
    return [_taken(one) for one in value.values()] if isinstance(value, dict) else value


def agree(one: Any, two: Any) -> bool:
    """Whether two results are the same but for roundings: of nearly equal experts either may be chosen."""
    if isinstance(one, torch.Tensor):
        if one.is_floating_point():
            return torch.allclose(one.sort(-1).values, two.sort(-1).values, rtol=5e-3, atol=1e-6)
        same = one.sort(-1).values == two.sort(-1).values
        return bool(same.all(-1).float().mean() > 0.98)
    if isinstance(one, list):
        return len(one) == len(two) and all(agree(a, b) for a, b in zip(one, two, strict=True))
    return bool(one == two)


def pair(case: Case, version: str) -> Iterator[dict[str, Any]]:
    """One row without the patch and one with it, on this release.

    Raises:
        WrongResult: the patch is not in place, or changes the result of healthy inputs.
    """
    subject = PATCHES[case.patch]
    calls = case.calls()
    found: dict[str, list[measure.Times]] = {"without": [], "patched": []}
    wanted: Any = None
    for provider in [*found] * (HOST_TURNS if case.host else 1):
        # Timed calls have left a result: it is overwritten, so that the next one must write it.
        outcome(case, calls[0])
        if provider == "patched":
            subject.apply(version if subject.applies_to(version) else subject.versions[-1][0])
        try:
            got = outcome(case, calls[0])
            if provider == "patched" and "in place" not in standing.targets(case.patch).values():
                why = standing.stepped_back.get(case.patch, "its functions were not imported")
                raise measure.WrongResult(f"{case.patch} is not in place, this would time vLLM alone: {why}")
            if provider == "patched" and not agree(wanted, got):
                raise measure.WrongResult(f"{case.patch} changes the result of {case.mode}")
            found[provider].append(timed(case, calls))
            if case.patch in standing.stepped_back:
                raise measure.WrongResult(f"{case.patch}: {standing.stepped_back[case.patch]}")
        finally:
            subject.revert()
        if provider == "without":
            wanted = got
    needed = bool(table()[version][case.patch]["needed"])
    for provider, each in found.items():
        row = measure.row(
            *(subject.incident, f"patch {case.patch}", provider, case.mode, "rows", BATCH),
            sorted(each, key=lambda times: times.p50)[len(each) // 2],
            case.moved,
            cache=None if case.host else case.cache,
        )
        yield row | {"vllm": version, "needed": needed, "applies_to": applies_to(subject)}


def timed(case: Case, calls: list[Call]) -> measure.Times:
    """Time of the calling thread or of the device, as the case says."""
    if case.host:
        return measure.host_times({case.mode: calls[0]}, rounds=HOST_ROUNDS)[case.mode]
    return measure.graph_times(calls)


def measured(found: Iterator[Case], version: str, library: bool) -> Iterator[dict[str, Any]]:
    for case in found:
        if library or not case.library:
            yield from pair(case, version)


def rows() -> list[dict[str, Any]]:
    """Measure every patch that runs in a decode step.

    Raises:
        DeviceError: no GPU.
        WrongResult: a patch is not in place, or changes a result.
    """
    measure.require_gpu()
    try:
        root = vllm_root()
    except UnavailableError as error:
        print(f"patches: not run, {error}")
        return []
    path = os.environ.get("STALEPROOF_VLLM_MOE_SO")
    if path is None:
        print("STALEPROOF_VLLM_MOE_SO is not set: vLLM's routing is not run")
    else:
        torch.ops.load_library(path)
    library, older = path is not None, older_root()
    if older is None:
        print(f"vLLM {OLDER} was not fetched: patches that {VERSION} does not need are timed on its files")
    found: list[dict[str, Any]] = []
    version, folder, files = (VERSION, root, FILES) if older is None else (OLDER, older, OLDER_FILES)
    with executed(folder, *files):
        vllm_calls.import_ops()
        found += measured(older_cases(version), version, library)
    with executed(root, *FILES):
        vllm_calls.import_ops()
        found += measured(cases(), VERSION, library)
    return found


if __name__ == "__main__":
    measure.print_rows(rows(), baseline="without")
