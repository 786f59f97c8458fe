"""vLLM's own dispatcher, metadata builders and Triton kernels of one release, on a CPU (model runner V1).

The files run unchanged; every other ``vllm`` module is a stub (:mod:`staleproof.kernels.vllm_sources`), and
Triton interprets the kernels. Three things are modelled. A replay calls the kernels with the metadata of the
builder's capture, whose counts are frozen and whose tensors are the builder's persistent buffers: what a
captured graph reads. The layer is its kernels of decode, without projections. A prefill is PyTorch, because
the interpreter cannot run the chunked kernels; it starts from zero and writes the request's own block.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import SimpleNamespace as Space
from typing import Any
from unittest import mock

import torch

from staleproof.kernels.vllm_sources import Unset, executed, fitting, package
from staleproof.vllm.patches.uniform_decode import RUNNER
from staleproof.vllm.sources import Sources, file_of

BACKENDS = "vllm.v1.attention.backends"
LAYERS = "vllm.model_executor.layers"
CONV = f"{LAYERS}.mamba.ops.causal_conv1d"
FILES = (
    *("vllm.config.compilation", "vllm.forward_context", "vllm.v1.cudagraph_dispatcher", RUNNER),
    *("vllm.v1.kv_cache_interface", "vllm.v1.attention.backend", f"{BACKENDS}.utils"),
    *(f"{BACKENDS}.gdn_attn", f"{BACKENDS}.linear_attn", CONV, f"{LAYERS}.lightning_attn"),
)
CLEAR = "clear_linear_attention_cache_for_new_sequences"
# The kernels of GDN: where older releases keep them, and newer ones.
RECURRENT = f"{LAYERS}.fla.ops", "vllm.third_party.flash_linear_attention.ops"
BLOCKS, ROWS = 24, 2
# Key heads, value heads, sizes of their vectors, taps of the convolution; channels that it mixes.
KEYS, VALUES, KEY, VALUE, TAPS = 1, 1, 32, 32, 4
CHANNELS = 2 * KEYS * KEY + VALUES * VALUE
# Largest difference to the reference that counts as rounding: of 0.3, by kernels and PyTorch in fp32.
ROUNDING = 1e-5


@contextlib.contextmanager
def release(version: str) -> Iterator[None]:
    """Let ``import vllm`` find these files of a release, inside a ``with``.

    Raises:
        MissingError: the files are missing.
    """
    folder = package(version)
    kernels = next(name for name in RECURRENT if folder.joinpath(*name.split(".")[1:]).is_dir())
    parts = folder.joinpath(*kernels.split(".")[1:]).glob("[!_]*.py")
    with executed(folder, *FILES, *(f"{kernels}.{part.stem}" for part in parts)):
        known: dict[str, dict[str, Any]] = {
            "vllm.envs": {"VLLM_LOG_BATCHSIZE_INTERVAL": -1.0, "VLLM_KV_CACHE_LAYOUT": None},
            "vllm.utils.math_utils": {"cdiv": lambda a, b: -(-a // b)},
            "vllm.distributed.parallel_state": {"get_pp_group": lambda: Space(is_last_rank=True)},
            "vllm.utils.torch_utils": {
                "async_tensor_h2d": _tensor,
                "np_to_pinned_tensor": torch.from_numpy,
                "PIN_MEMORY": False,
            },
            "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": contextlib.nullcontext},
            # Nothing of prefix caching.
            f"{LAYERS}.mamba.checkpoint": {"MambaPrefillCheckpointBuilder": lambda *args: Space(build=_none)},
            # Decorators of the runner.
            "vllm.tracing": {"instrument": lambda **names: lambda function: function},
            "vllm.model_executor.warmup.jit_warmup": {
                "JitWarmupRegistry": Space(capture=lambda function: function)
            },
            "vllm.compilation.breakable_cudagraph": {"is_breakable_cudagraph_enabled": lambda: False},
            f"{LAYERS}.mamba.gdn.qwen_gdn_linear_attn": {
                "_resolve_gdn_prefill_backend": lambda config: (None, "triton")
            },
        }
        compilation = importlib.import_module("vllm.config.compilation")
        known["vllm.config"] = {"CUDAGraphMode": compilation.CUDAGraphMode}
        for name, members in known.items():
            vars(importlib.import_module(name)).update(members)
        yield


def _drawn(seed: float, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(int(seed)))


def _none(*args: Any) -> None:
    return None


def _tensor(data: Any, dtype: Any = None, **where: Any) -> torch.Tensor:
    return torch.as_tensor(data, dtype=dtype)


@contextlib.contextmanager
def _kernels() -> Iterator[None]:
    """Run kernels: what ``torch.empty`` returns is NaN, and a scalar of bool stays bool when broadcast.

    Triton 3.9.0's interpreter gives such a scalar the type of the numbers that were compared, and then
    refuses it as a mask.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    splat = InterpreterBuilder.create_splat

    def of_bool(self: Any, kind: Any, scalar: Any) -> Any:
        handle = splat(self, kind, scalar)
        if scalar.data.dtype == bool:
            handle.data = handle.data.astype(bool)
        return handle

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with mock.patch.object(InterpreterBuilder, "create_splat", of_bool):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


class Gdn:
    """A layer of gated delta rule (Qwen3-Next), with drafts or without.

    Args:
        k: draft tokens of a step of decode.
    """

    module, builder, kind = f"{BACKENDS}.gdn_attn", "GDNAttentionMetadataBuilder", "gdn_attention"

    def __init__(self, k: int) -> None:
        self.k, self.weight = k, _drawn(1, CHANNELS, TAPS) * 0.5
        shapes = (TAPS - 1 + k, CHANNELS), (VALUES, VALUE, KEY)
        self.states = [torch.zeros(BLOCKS, *shape) for shape in shapes]

    def inputs(self, tokens: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What projections would give: (T, CHANNELS), and the two gates (T, VALUES)."""
        x = torch.stack([_drawn(token, CHANNELS) for token in tokens])
        gates = torch.stack([_drawn(100 + token, 2, VALUES) for token in tokens])
        return x, gates[:, 0], gates[:, 1]

    def reference(self, tokens: Sequence[float]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Outputs (T, VALUES, VALUE) from a state of zeros in PyTorch, and the states behind them."""
        (x, b, a), functional = self.inputs(tokens), torch.nn.functional
        padded = functional.pad(x.T[None], (TAPS - 1, 0))
        y = functional.silu(functional.conv1d(padded, self.weight[:, None], groups=CHANNELS)[0].T)
        state, out = torch.zeros(VALUES, VALUE, KEY), []
        for row, gate, decay in zip(y, b, a, strict=True):
            q, k, v = row.split([KEYS * KEY, KEYS * KEY, VALUES * VALUE])
            q, k = (
                functional.normalize(one.view(KEYS, KEY), dim=-1).repeat_interleave(VALUES // KEYS, 0)
                for one in (q, k)
            )
            state = state * torch.exp(-functional.softplus(decay))[:, None, None]
            missing = v.view(VALUES, VALUE) - torch.einsum("hvk,hk->hv", state, k)
            state = state + (torch.sigmoid(gate)[:, None] * missing)[:, :, None] * k[:, None]
            out.append(torch.einsum("hvk,hk->hv", state, q) * KEY**-0.5)
        # The convolution of a request without drafts reads the first rows of its block.
        tail = torch.zeros(TAPS - 1 + self.k, CHANNELS)
        tail[: TAPS - 1] = torch.cat((torch.zeros(TAPS - 1, CHANNELS), x))[1 - TAPS :]
        return torch.stack(out), [tail, state]

    def decode(self, meta: Any, tokens: Sequence[float]) -> torch.Tensor:
        """The layer's two kernels of decode, as it calls them: outputs (T, VALUES, VALUE)."""
        (x, b, a), more = self.inputs(tokens), {}
        index, starts, rows = (
            meta.non_spec_state_indices_tensor,
            meta.non_spec_query_start_loc,
            meta.num_decodes,
        )
        if self.k:
            index, starts, rows = (
                meta.spec_state_indices_tensor, meta.spec_query_start_loc, meta.num_spec_decodes
            )  # fmt: skip
            more = {"num_accepted_tokens": meta.num_accepted_tokens}
        named = {**more, "query_start_loc": starts, "max_query_len": index.size(-1)} if self.k else {}
        first = index[:rows, 0] if self.k else index[: len(tokens)]
        y = importlib.import_module(CONV).causal_conv1d_update(
            x, self.states[0].transpose(-1, -2), self.weight, None, "silu", conv_state_indices=first, **named
        )
        q, k, v = y.split([KEYS * KEY, KEYS * KEY, VALUES * VALUE], dim=-1)
        out, _ = _recurrent().fused_sigmoid_gating_delta_rule_update(
            A_log=torch.zeros(VALUES), a=a, b=b, dt_bias=torch.zeros(VALUES),
            q=q.reshape(1, -1, KEYS, KEY), k=k.reshape(1, -1, KEYS, KEY), v=v.reshape(1, -1, VALUES, VALUE),
            initial_state=self.states[1], inplace_final_state=True, cu_seqlens=starts[: rows + 1],
            ssm_state_indices=index, use_qk_l2norm_in_kernel=True, **more,
        )  # fmt: skip
        found: torch.Tensor = out[0]
        return found


def _recurrent() -> Any:
    for name in RECURRENT:
        module = importlib.import_module(f"{name}.fused_sigmoid_gating")
        # The other name is a stub.
        if hasattr(module, "__file__"):
            return module
    raise AssertionError("no kernel of GDN")


class Bailing:
    """A layer of linear attention (Ling and Ring 2.5), without drafts."""

    module, kind = f"{BACKENDS}.linear_attn", "linear_attention"
    builder, k = "BailingLinearAttentionMetadataBuilder", 0

    def __init__(self) -> None:
        self.states = [torch.zeros(BLOCKS, VALUES, KEY, KEY)]
        self.slope = torch.full((VALUES,), 0.1)

    def inputs(self, tokens: Sequence[float]) -> torch.Tensor:
        """q, k and v of each token: (3, T, VALUES, KEY)."""
        return torch.stack([_drawn(token, 3, VALUES, KEY) for token in tokens], 1)

    def reference(self, tokens: Sequence[float]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Outputs (T, VALUES * KEY) from a state of zeros in PyTorch, and the state behind them."""
        state, out = torch.zeros(VALUES, KEY, KEY), []
        for q, k, v in self.inputs(tokens).unbind(1):
            state = torch.exp(-self.slope)[:, None, None] * state + k[:, :, None] * v[:, None]
            out.append(torch.einsum("hk,hkv->hv", q, state).flatten())
        return torch.stack(out), [state]

    def decode(self, meta: Any, tokens: Sequence[float]) -> torch.Tensor:
        """What the layer does in a step of decode: clear the state of new requests, and the kernel."""
        index = meta.state_indices_tensor
        # The whole file would need transformers.
        folder = Path(importlib.import_module(RUNNER).__file__ or "").parents[2]
        names: dict[str, Any] = {}
        exec(
            Sources(folder).function(file_of(f"{LAYERS}.mamba.linear.bailing_linear_attn"), CLEAR).text, names
        )
        names[CLEAR](self.states[0], index, meta)
        decode = importlib.import_module(f"{LAYERS}.lightning_attn").linear_decode_forward_triton
        q, k, v = self.inputs(tokens)[:, :, :, None]
        found: torch.Tensor = decode(q, k, v, self.states[0], self.slope, index[: meta.num_decodes], 32)
        return found


@dataclass(eq=False)
class Served:
    """One request: its tokens, its prompt, its blocks, and its outputs so far, one tensor a token."""

    name: str
    tokens: list[float]
    prompt: int
    blocks: list[int]
    computed: int = 0
    # Of the step before: how many of its tokens were accepted.
    accepted: int = 1
    outputs: list[torch.Tensor] = field(default_factory=list)


Plan = Sequence[tuple[Served, int, int]]


class Server:
    """A release's dispatcher and builder over one layer, inside :func:`release`; the steps are of the caller.

    Args:
        layer: the layer.
        graphs: whether graphs of decode are captured.

    Attributes:
        modes: the mode of each step, as vLLM names it.
    """

    def __init__(self, layer: Gdn | Bailing, graphs: bool = True) -> None:
        self.layer, self.k, self.modes = layer, layer.k, list[str]()
        self._next = 1
        width = layer.k + 1
        self.runner_class = importlib.import_module(RUNNER).GPUModelRunner
        mode = importlib.import_module("vllm.config.compilation").CUDAGraphMode
        mode = mode.FULL_DECODE_ONLY if graphs else mode.NONE
        sizes = [width * rows for rows in range(1, ROWS + 1)]
        compilation = Space(
            cudagraph_mode=mode, cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1],
            compile_sizes=[], pass_config=Space(enable_sp=False), cudagraph_specialize_lora=False,
            is_attention_compiled_piecewise=lambda: True,
            static_forward_context={"layer": Space(kv_cache=tuple(layer.states))},
        )  # fmt: skip
        drafts = Space(num_speculative_tokens=layer.k, parallel_drafting=False) if layer.k else None
        config = mock.MagicMock(
            compilation_config=compilation, speculative_config=drafts, num_speculative_tokens=layer.k,
            lora_config=None, use_v2_model_runner=False, additional_config={},
            cache_config=Space(mamba_cache_mode="none", block_size=16, mamba_block_size=512),
            scheduler_config=Space(max_num_seqs=ROWS, max_num_batched_tokens=64),
            parallel_config=Space(
                data_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1,
                use_ubatching=False,
            ),
            observability_config=Space(cudagraph_metrics=False),
        )  # fmt: skip
        kv = importlib.import_module("vllm.v1.kv_cache_interface")
        spec = fitting(
            kv.MambaSpec, block_size=512, shapes=tuple(s.shape[1:] for s in layer.states),
            dtypes=tuple(s.dtype for s in layer.states), mamba_type=layer.kind,
            num_speculative_blocks=layer.k,
        )  # fmt: skip
        make = getattr(importlib.import_module(layer.module), layer.builder)
        self.builder = make(spec, ["layer"], config, torch.device("cpu"))
        dispatcher = importlib.import_module("vllm.v1.cudagraph_dispatcher").CudagraphDispatcher(config)
        dispatcher.initialize_cudagraph_keys(mode, width)
        self.runner = mock.MagicMock(
            vllm_config=config, compilation_config=compilation, parallel_config=config.parallel_config,
            observability_config=config.observability_config, cudagraph_dispatcher=dispatcher,
            uniform_decode_query_len=width, model_config=Space(is_encoder_decoder=False, is_hybrid=True),
            input_batch=mock.MagicMock(lora_id_to_lora_request={}, req_id_to_index={}),
            _is_uniform_decode=self.runner_class._is_uniform_decode, use_async_scheduling=False,
            _pad_for_sequence_parallelism=lambda tokens: tokens, speculative_config=None,
            uses_xdrope_dim=0,
            kv_cache_config=Space(kv_cache_groups=[Space(kv_cache_spec=spec, layer_names=["layer"])]),
        )  # fmt: skip
        nobody = [Served("", [0.0] * width, 0, [0] * width) for _ in range(ROWS)]
        self.graphs = {
            rows: self.builder.build_for_cudagraph_capture(
                self._common([(r, width, 0) for r in nobody[:rows]])
            )
            for rows in range(1, ROWS + 1 if graphs else 1)
        }

    def request(self, tokens: Sequence[float], prompt: int | None = None) -> Served:
        """A new request in blocks of its own; all tokens are its prompt, unless ``prompt`` says how many."""
        first, self._next = self._next, self._next + self.k + 1
        blocks = [*range(first, self._next)]
        return Served(str(first), [*tokens], len(tokens) if prompt is None else prompt, blocks)

    def prefill(self, request: Served, tokens: int) -> None:
        """Compute the first tokens of a request in a step that is surely no decode: in PyTorch."""
        out, states = self.layer.reference(request.tokens[:tokens])
        for cache, state in zip(self.layer.states, states, strict=True):
            cache[request.blocks[0]] = state
        request.outputs, request.computed, request.accepted = [*out], tokens, 1

    def step(self, plan: Plan) -> str:
        """Run one step: of each request tokens, and drafts among them, all accepted. Returns its mode."""
        self.runner_class._update_states(self.runner, _scheduled(plan))
        lengths = [tokens for _, tokens, _ in plan]
        mode = fitting(
            self.runner_class._determine_batch_execution_and_padding.__get__(self.runner),
            num_tokens=sum(lengths), num_reqs=len(plan),
            num_scheduled_tokens_np=torch.tensor(lengths).numpy(),
            max_num_scheduled_tokens=max(lengths), use_cascade_attn=False,
        )[0].name  # fmt: skip
        more: dict[str, Any] = {}
        if self.k:
            more["num_accepted_tokens"] = torch.tensor([r.accepted for r, *_ in plan], dtype=torch.int32)
            drafts = [drafted or -1 for *_, drafted in plan]
            more["num_decode_draft_tokens_cpu"] = torch.tensor(drafts, dtype=torch.int32)
        meta = self.builder.build(0, self._common(plan), **more)
        given = [request.tokens[request.computed :][:tokens] for request, tokens, _ in plan]
        if mode == "FULL":
            with _kernels():
                out = self.layer.decode(self.graphs[len(plan)], [*chain(*given)])
            for (request, tokens, _), rows in zip(plan, out.split(lengths), strict=True):
                self._keep(request, rows, tokens)
        else:
            self._eager(plan, meta, given)
        self.modes.append(mode)
        return str(mode)

    def _eager(self, plan: Plan, meta: Any, given: list[list[float]]) -> None:
        """Prefills in PyTorch, and the kernels of decode for the rest."""
        prefills = [n > 1 if self.k == 0 else not drafted for _, n, drafted in plan]
        if self.k == 0 and meta.num_prefills:
            prefills = [row >= meta.num_decodes for row in range(len(plan))]
        decoded = [row for row, prefill in enumerate(prefills) if not prefill]
        if decoded:
            with _kernels():
                out = self.layer.decode(meta, [*chain(*(given[row] for row in decoded))])
            parts = out.split([len(given[row]) for row in decoded])
            for row, rows in zip(decoded, parts, strict=True):
                self._keep(plan[row][0], rows, len(given[row]))
        for (request, tokens, _), prefill in zip(plan, prefills, strict=True):
            if prefill:
                self.prefill(request, request.computed + tokens)

    def _keep(self, request: Served, rows: torch.Tensor, tokens: int) -> None:
        request.outputs += [*rows]
        request.computed += tokens
        request.accepted = tokens

    def error(self, request: Served) -> float:
        """Largest difference of its outputs to the reference; NaN if some were never written."""
        right = self.layer.reference(request.tokens[: len(request.outputs)])[0]
        return float((torch.stack(request.outputs).view_as(right) - right).abs().max())

    def _common(self, plan: Plan) -> Any:
        backend = importlib.import_module("vllm.v1.attention.backend")
        lengths = torch.tensor([tokens for _, tokens, _ in plan], dtype=torch.int32)
        computed = torch.tensor([request.computed for request, *_ in plan], dtype=torch.int32)
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        ends, prompts = computed + lengths, torch.tensor([request.prompt for request, *_ in plan])
        tables = torch.tensor([request.blocks for request, *_ in plan], dtype=torch.int32)
        return fitting(
            backend.CommonAttentionMetadata, query_start_loc=starts, query_start_loc_cpu=starts.clone(),
            seq_lens=ends, num_reqs=len(plan), num_actual_tokens=int(lengths.sum()),
            max_query_len=int(lengths.max()), max_seq_len=int(ends.max()), block_table_tensor=tables,
            slot_mapping=torch.zeros(int(lengths.sum()), dtype=torch.int64), is_prefilling=computed < prompts,
            seq_lens_cpu_upper_bound=ends.clone(), _seq_lens_cpu=ends.clone(),
            _num_computed_tokens_cpu=computed,
        )  # fmt: skip


def _scheduled(plan: Plan) -> Any:
    """What the scheduler gives to ``_update_states``; requests that run already are not named."""
    new = [
        mock.MagicMock(req_id=r.name, num_computed_tokens=0, block_ids=([*r.blocks],))
        for r, *_ in plan
        if not r.computed
    ]
    cached = mock.MagicMock(req_ids=[], resumed_req_ids=set(), num_computed_tokens=[], new_block_ids=[])
    return mock.MagicMock(
        finished_req_ids=set(), free_encoder_mm_hashes=[], new_block_ids_to_zero=None,
        scheduled_new_reqs=new, scheduled_cached_reqs=cached, kv_cache_block_copies=None,
        num_scheduled_tokens={r.name: tokens for r, tokens, _ in plan},
        scheduled_spec_decode_tokens={r.name: [0] * drafts for r, _, drafts in plan if drafts},
    )  # fmt: skip


CONFIG = "config/vllm.py"


class _Configured:
    """vLLM's configuration of one deployment, as far as the choice of a runner reads it."""

    def __init__(self, method: str | None) -> None:
        self.model_config = Space(
            architectures=["Qwen3NextForCausalLM"], runner_type="generate", is_moe=True, is_quantized=False,
            is_diffusion=False, is_hybrid=True, logits_processors=None, use_mla=False,
        )  # fmt: skip
        self.parallel_config = Unset(pipeline_parallel_size=1, prefill_context_parallel_size=1)
        self.speculative_config = Unset(method=method) if method else None
        self.attention_config, self.cache_config = Unset(), Unset()
        self.compilation_config = Unset(pass_config=Unset())

    def __getattr__(self, name: str) -> Any:
        return None


def model_runner(version: str, method: str | None) -> str:
    """The runner that a release gives Qwen3-Next by default: its own property, over a made-up configuration.

    Args:
        version: the release.
        method: of speculative decoding, or ``None``.
    """
    sources = Sources(package(version))
    if "def use_v2_model_runner" not in sources.text(CONFIG):
        return "V1"
    tree = ast.parse(sources.text(CONFIG))
    (config,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "VllmConfig")
    # What the choice calls. The whole class would need pydantic.
    methods = [
        one
        for one in config.body
        if isinstance(one, ast.FunctionDef) and re.search("v2_model_runner|dflash|dbo", one.name)
    ]
    kinds = ast.Assign | ast.AnnAssign | ast.FunctionDef
    lists = [one for one in tree.body if isinstance(one, kinds) and "_ARCHITECTURES" in ast.unparse(one)]
    names: dict[str, Any] = {
        "Configured": _Configured, "HAS_TRITON": True, "logger": mock.MagicMock(),
        "envs": Space(VLLM_USE_V2_MODEL_RUNNER=None), "lru_cache": functools.lru_cache,
        "CompilationMode": mock.MagicMock(),
        "current_platform": Space(is_unspecified=lambda: False),
    }  # fmt: skip
    chosen = ast.ClassDef("Chosen", [ast.Name("Configured", ast.Load())], [], [*methods], [])
    module = ast.fix_missing_locations(ast.Module([*lists, chosen], []))
    # An import inside the property finds a stub.
    with executed(sources.package):
        exec(compile(module, CONFIG, "exec"), names)
        # Not by its name: an AttributeError inside a property would be taken for a missing one.
        choose = vars(names["Chosen"])["use_v2_model_runner"].fget
        return "V2" if choose(names["Chosen"](method)) else "V1"
