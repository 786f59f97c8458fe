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

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from staleproof import device

device.select()

from staleproof import measure
from staleproof.kernels.vllm_sources import UnavailableError, executed, load
from staleproof.vllm.patches import kv_reuse, mla_padding, moe_routing, scale_padding
from staleproof.vllm.releases import applies_to, table
from staleproof.vllm.sources import file_of, vllm_file
from staleproof.vllm.standing import registry

# Imported by name, so that the source digest of a recorded row covers them.
PARTS = (kv_reuse, mla_padding, moe_routing, scale_padding)
PATCHES = {patch.name: patch for part in PARTS for patch in part.PATCHES}
TRITON_MLA = "vllm.v1.attention.backends.mla.triton_mla"
DECODE_ATTENTION = "vllm.v1.attention.ops.triton_decode_attention"
WORKER = "vllm.v1.worker.utils"
OPS = "vllm._custom_ops"
SCHEDULER = "vllm.v1.core.sched.scheduler"
MANAGERS = "vllm.v1.core.kv_cache_manager", "vllm.v1.core.single_type_kv_cache_manager"
SCHEDULING = (SCHEDULER, "vllm.v1.core.sched.output", *MANAGERS)
EXPERTS = "vllm.model_executor.layers.fused_moe.flashinfer_cutlass_moe"

VERSION, OLDER = "0.20.2", "0.19.1"
# vllm.envs, because a patch that torch.compile traces adds itself to the compile-cache key there.
OLDER_FILES = (OPS, "vllm.envs")
FILES = (*(TRITON_MLA, DECODE_ATTENTION, WORKER, EXPERTS), *SCHEDULING, *OLDER_FILES)
BATCH, HEADS, CONTEXT, PAGE = 128, 128, 512, 64
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
        return [topk_call(name, BATCH, experts, top_k, bias)]

    moved = BATCH * experts * 2 + BATCH * top_k * 8
    yield Case(patch, words, calls, moved, library=True)
    yield Case(patch, f"host: {words}", calls, host=True, library=True)


def older_cases(version: str) -> Iterator[Case]:
    """Patches that the installed release does not need; on its files if there are no others."""
    yield from routing("topk_nan", "topk_softmax", 128, 8, biased=False)
    if version == OLDER:
        ops, where = import_ops(), torch.device("cuda")

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
            experts, given = experts_call(rows, 8)
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
        yield Case(patch, "host: schedule() of 64 requests", lambda: [schedule_call(64)], host=True)


# Calls of vLLM's own functions, with the least that each needs around it. Each is a closure over the function
# as it is found at the time of the call, patched or not, and returns what its caller would see.


def import_ops() -> ModuleType:
    """vLLM's ``_custom_ops``, without its kernels for fake tensors.

    A process can register those only once, and here two releases may be loaded one after another.
    """
    with mock.patch.object(torch.library, "register_fake", return_value=lambda function: function):
        return importlib.import_module(OPS)


def mla_call(
    batch: int, live: int, heads: int = 128, context: int = 512
) -> tuple[Callable[[], Any], torch.Tensor]:
    """vLLM's Triton ``forward_mqa`` for a padded decode batch, and its lengths."""
    cls = importlib.import_module(TRITON_MLA).TritonMLAImpl
    impl = cls.__new__(cls)
    impl.kv_lora_rank, impl.scale = 512, 576**-0.5
    impl.need_to_return_lse_for_decode = False
    impl._sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    q = torch.randn(batch, heads, 576, dtype=torch.bfloat16, device="cuda")
    pages = context // PAGE
    cache = torch.randn(batch * pages, PAGE, 576, dtype=torch.bfloat16, device="cuda")
    seq_lens = torch.zeros(batch, dtype=torch.int32, device="cuda")
    seq_lens[:live] = context
    pages_of = torch.arange(batch * pages, dtype=torch.int32, device="cuda").view(batch, pages)
    one = torch.ones(1, device="cuda")
    layer = SimpleNamespace(_k_scale=one, _v_scale=one)
    metadata = SimpleNamespace(
        decode=SimpleNamespace(seq_lens=seq_lens, block_table=pages_of),
        num_decodes=batch,
        num_decode_tokens=batch,
        max_seq_len=context,
    )
    return lambda: impl.forward_mqa(q, cache, metadata, layer), seq_lens


def topk_call(
    name: str, rows: int, experts: int, top_k: int, bias: torch.Tensor | None
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """One of vLLM's routing ops on healthy bf16 logits; (weights, ids).

    Args:
        name: ``topk_softmax``, ``topk_sigmoid``, ``grouped_topk`` or ``topk_hash_softplus_sqrt``.
        rows, experts, top_k: sizes.
        bias: (experts,) float32.
    """
    ops = importlib.import_module(OPS)
    x = torch.randn(rows, experts, dtype=torch.bfloat16, device="cuda")
    weights = torch.empty(rows, top_k, device="cuda")
    ids, indices = (torch.empty(rows, top_k, dtype=torch.int32, device="cuda") for _ in range(2))
    if name == "grouped_topk":
        return lambda: ops.grouped_topk(x, 8, 4, top_k, True, 2.5, bias, 1)
    scaling = (2.5,) if name == "topk_hash_softplus_sqrt" else ()

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        getattr(ops, name)(weights, ids, indices, x, True, *scaling, bias)
        return weights, ids

    return call


def zeroer(pin: bool = True, layers: int = 28) -> tuple[Any, list[torch.Tensor]]:
    """vLLM's KVBlockZeroer over layers of (2, 64 blocks, 16, 8, 128) bf16, and the caches."""
    worker = importlib.import_module(WORKER)
    spec = worker.FullAttentionSpec()
    spec.block_size, spec.num_kv_heads, spec.head_size = 16, 8, 128
    caches = [torch.ones(2, 64, 16, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    names = [str(i) for i in range(layers)]
    group = SimpleNamespace(
        kv_cache_spec=spec,
        kv_cache_group_id=0,
        layer_names=names,
        backend=SimpleNamespace(get_kv_cache_block_dim=lambda *a, **k: 1),
    )
    of_layer = {n: SimpleNamespace(kv_cache=c) for n, c in zip(names, caches, strict=True)}
    made = worker.KVBlockZeroer(torch.device("cuda"), pin)
    made.init_meta([group], [16], "auto", set(), of_layer)
    return made, caches


class _Running:
    """A request in decode: each step has one new token for it."""

    num_output_placeholders, num_prompt_tokens, max_tokens = 0, 100, 10**6
    num_tokens_with_spec, num_tokens, num_output_tokens = 201, 201, 101
    has_encoder_inputs = use_structured_output = False
    spec_token_ids: tuple[int, ...] = ()
    lora_request = None

    def __init__(self, number: int) -> None:
        self.request_id = str(number)

    @property
    def num_computed_tokens(self) -> int:
        return 200

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        """Stays, so that each call has the same work."""


def schedule_call(requests: int) -> Callable[[], Any]:
    """vLLM's ``Scheduler.schedule`` with that many requests in decode, and nothing to zero.

    The scheduler, the manager's list of new ids and its draining are vLLM's. Allocation is left out:
    one block of one request is recorded as new in each step, as with 16 tokens a block.
    """
    module: Any = importlib.import_module(SCHEDULER)
    managers, single = (importlib.import_module(name) for name in MANAGERS)
    of_type = single.FullAttentionManager.__new__(single.FullAttentionManager)
    of_type.new_block_ids = []
    manager = managers.KVCacheManager.__new__(managers.KVCacheManager)
    manager.coordinator = SimpleNamespace(
        single_type_managers=(of_type,), new_step_starts=lambda: of_type.new_block_ids.append(7)
    )
    none = SimpleNamespace(get_block_ids=lambda allow_none=False: None)
    manager.allocate_slots = lambda *args, **kwargs: none
    manager.get_num_common_prefix_blocks = lambda request: [0]
    module.record_function_or_nullcontext = lambda name: contextlib.nullcontext()
    running = [_Running(number) for number in range(requests)]
    made = module.Scheduler.__new__(module.Scheduler)
    for name, value in {
        "max_num_scheduled_tokens": 8192,
        "max_num_encoder_input_tokens": 0,
        "max_num_running_reqs": requests,
        "max_model_len": 10**6,
        "num_lookahead_tokens": 0,
        "_pause_state": module.PauseState.UNPAUSED,
        "kv_cache_manager": manager,
        "kv_cache_config": SimpleNamespace(kv_cache_groups=(None,)),
        "scheduler_config": SimpleNamespace(long_prefill_token_threshold=0, async_scheduling=False),
        "encoder_cache_manager": SimpleNamespace(get_freed_mm_hashes=list),
        "requests": {request.request_id: request for request in running},
        "running": running,
        "prev_step_scheduled_req_ids": {request.request_id for request in running},
        "finished_req_ids": set(),
        "policy": None,
    }.items():
        setattr(made, name, value)
    for name in ("lora_config", "connector", "ec_connector", "waiting", "skipped_waiting", "use_pp"):
        setattr(made, name, None)
    for name in ("needs_kv_cache_zeroing", "need_mamba_block_aligned_split", "use_v2_model_runner"):
        setattr(made, name, False)
    module.create_request_queue = lambda policy: ()
    return lambda: made.schedule().num_scheduled_tokens


def experts_call(rows: int, top_k: int) -> tuple[Callable[[], None], dict[str, torch.Tensor]]:
    """vLLM's ``FlashInferExperts.apply`` for bf16 experts; FlashInfer's kernel is a copy of its input.

    The dict holds the ids and weights that the kernel was given last.
    """
    module: Any = importlib.import_module(EXPERTS)
    seen: dict[str, torch.Tensor] = {}

    def kernel(**given: Any) -> None:
        given["output"].copy_(given["input"])
        seen.update(ids=given["token_selected_experts"], weights=given["token_final_scales"])

    module.flashinfer_cutlass_fused_moe = kernel
    impl = module.FlashInferExperts.__new__(module.FlashInferExperts)
    for name in ("quant_dtype", "weight_quant_dtype", "out_dtype", "use_dp"):
        setattr(impl, name, None)
    impl.tp_size = impl.ep_size = impl.max_capture_size = 1
    impl.tp_rank = impl.ep_rank = 0
    impl.use_deepseek_fp8_block_scale = False
    x = torch.randn(rows, 64, dtype=torch.bfloat16, device="cuda")
    out, experts = torch.empty_like(x), torch.empty(128, 64, dtype=torch.bfloat16, device="cuda")
    weights = torch.rand(rows, top_k, device="cuda")
    ids = torch.rand(rows, len(experts), device="cuda").topk(top_k).indices.int()
    silu = module.MoEActivation.SILU

    def call() -> None:
        impl.apply(out, x, experts, experts, weights, ids, silu, len(experts), *[None] * 6, False)

    return call, seen


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
            if provider == "patched" and "in place" not in registry.targets(case.patch).values():
                why = registry.reason(case.patch) or "its functions were not imported"
                raise measure.WrongResult(f"{case.patch} is not in place, this would time vLLM alone: {why}")
            if provider == "patched" and not agree(wanted, got):
                raise measure.WrongResult(f"{case.patch} changes the result of {case.mode}")
            found[provider].append(timed(case, calls))
            if registry.reason(case.patch) is not None:
                raise measure.WrongResult(f"{case.patch}: {registry.reason(case.patch)}")
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
        import_ops()
        found += measured(older_cases(version), version, library)
    with executed(root, *FILES):
        import_ops()
        found += measured(cases(), VERSION, library)
    return found


if __name__ == "__main__":
    sys.exit(measure.main(rows, baseline="without"))
