"""The smallest counterexample of a broken clause, as a script of under 30 lines that runs alone.

Its first lines say what to install. It holds the adapter as it is, the smallest input that shows the case,
and an assertion of the clause: it ends with an AssertionError that says what was expected and what came while
the kernel breaks it, and quietly once it is mended. Each is run before it is handed on, and one that does not
show its break is not. ``tests/contract/alone.py`` runs recorded ones in environments of their own.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from staleproof.cases import children
from staleproof.cases.case import Reading
from staleproof.contract import environments
from staleproof.contract.contract import CLAUSES, TIMED_OUT
from staleproof.contract.scenes import Shape, mla_shape
from staleproof.kernels.packages import Release
from staleproof.kernels.subject import ARGUMENTS, Subject

LINES = 29
_FIRST = "def first(result): return result[0] if isinstance(result, tuple) else result"
# Clause -> cases of its probe, where the kernel raises or its process ends and no probe is left to name one.
CASES = {
    "B": (("table", "-1"), ("table", "end"), ("table", "far")),
    "D": (("repeated",),),
    "X": (("range", "-1"), ("range", "experts")),
}
# Packages with autotuned kernels, which Triton's interpreter cannot time.
_TUNED = ("fla-core", "liger-kernel")


def _import(function: Callable[..., Any]) -> list[str]:
    """The lines that import a function of a user's module, wherever the script is run from."""
    file = Path(inspect.getfile(function)).resolve()
    name = function.__module__.removeprefix("audited_")
    root = file.parents[name.count(".") + (file.name == "__init__.py")]
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib", "stdlib")}
    # Whoever runs it has this package, for its decorators.
    here = root in installed or name.startswith("staleproof.")
    place = [] if here else [f"import sys; sys.path.insert(0, {str(root)!r})"]
    return [*place, f"from {name} import {function.__name__}", _FIRST]


def _source(subject: Subject, *, short: bool = False) -> list[str]:
    """The adapter without its decorators; an import, if it is a function of a module of the user's.

    With ``short`` each of its statements is on one line.
    """
    function = subject.function
    if not subject.package:
        return _import(function)
    text = textwrap.dedent(inspect.getsource(function))
    if short:
        definition = ast.parse(text).body[0]
        assert isinstance(definition, ast.FunctionDef), subject.name
        definition.decorator_list = []
        text = ast.unparse(definition)
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("def "))
    # The script imports torch at its top.
    kept = [line for line in lines[start:] if line.strip() not in ("", "import torch")]
    return [line for line in kept if not line.strip().startswith("#")]


def _call(subject: Subject, **renamed: str) -> str:
    given = {name: repr(value) for name, value in subject.given.items()} | renamed
    arguments = [name for name in _named(subject) if name in ARGUMENTS[subject.kind] or name in given]
    call = (
        f"{subject.function.__name__}({', '.join(f'{name}={given.get(name, name)}' for name in arguments)})"
    )
    returns_launch = subject.shape.get("planned") or subject.shape.get("prepared")
    return call + "()" if returns_launch else call


def _named(subject: Subject) -> list[str]:
    return [*inspect.signature(subject.function).parameters]


def _prologue(subject: Subject) -> list[str]:
    if subject.needs in ("cuda", "sm90", "sm100"):
        return ["import torch", 'device = "cuda"']
    choice = 'device = "cuda" if torch.cuda.is_available() else "cpu"'
    if subject.package in environments.PLAIN:
        return ["import torch", choice]
    lines = ["import os, torch", choice]
    lines.append('os.environ.setdefault("TRITON_INTERPRET", str(int(device == "cpu")))')
    if subject.package == "vllm":
        lines += [
            'if device == "cpu":  # without a GPU vLLM hides Triton from its kernels',
            "    import sys, types, triton, triton.language as tl",
            '    sys.modules["vllm.triton_utils"] = types.SimpleNamespace(tl=tl, triton=triton)',
        ]
    if subject.package in _TUNED:
        first = "lambda self, *a, **k: self.fn.run(*a, **{**self.configs[0].all_kwargs(), **k})"
        lines += [
            'if device == "cpu":  # without a GPU there is nothing to time: the first configuration',
            "    from triton.runtime.autotuner import Autotuner",
            f"    Autotuner.run = {first}",
        ]
    return lines


_SAME = 'assert torch.equal(got, clean), f"expected {clean.flatten()[:4]}, got {got.flatten()[:4]}"'
_FIRST_OF_BOTH = "(r[0] if isinstance(r, tuple) else r for r in (clean, got))"
_BEHIND = [
    "def behind(x, byte):  # a copy of x, and behind it bytes that are not its own",
    "    slab = torch.full((x.nbytes + 4096,), byte, dtype=torch.uint8, device=device)",
    "    return slab[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)",
]
_DIRTY = "torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is filled with NaN"
_FILLS = {"NaN": 'float("nan")', "finite garbage": "1e4"}


def _gathered(subject: Subject, shape: Shape, case: tuple[str, ...]) -> list[str]:
    if case[0] != "tail":
        return []
    place = "k" if case[2].startswith("K") else "v"
    return [
        f"softmax_scale = {shape.head_dim**-0.5:.6f}",
        'dtype = torch.bfloat16 if device == "cuda" else torch.float32',
        f"sizes = [(1, {shape.heads}, n, {shape.head_dim}) for n in (1, 16, 16)]",
        "q, k, v = (torch.randn(size, device=device, dtype=dtype) for size in sizes)",
        "mask = (torch.arange(16, device=device) < 3)[None, None, None]",
        f"clean = {_call(subject)}",
        f"{place}[:, :, 3:] = {_FILLS[case[1]]}",
        f"got = {_call(subject)}",
        _SAME,
    ]


def _attention(subject: Subject, case: tuple[str, ...]) -> list[str]:
    own = "prepared", "planned", "empty_lse"
    sizes: dict[str, Any] = {k: v for k, v in subject.shape.items() if k not in own}
    shape = (mla_shape if sizes.get("layout") == "mla" else Shape)(**sizes)
    if shape.layout == "gathered":
        return _gathered(subject, shape, case)
    kind, batch = case[0], 2 if case[0].startswith("empty") else 1
    tokens = batch + 2 * (kind == "spare")
    cache = ["kv_cache"] if shape.layout == "mla" else ["k_cache", "v_cache"]
    dims = f"{shape.head_dim}" if shape.layout == "mla" else f"{shape.kv_heads}, {shape.head_dim}"
    poison = _poison(kind, case, cache)
    named = _named(subject)
    spare = kind == "spare" and "query_start_loc" in named
    if not poison and not spare and not kind.startswith("empty"):
        return []
    scalars = {
        "softmax_scale": f"{shape.head_dim**-0.5:.6f}",
        "page_size": str(shape.page_size),
        # An upper bound. With 1 FlashAttention takes heads for tokens, and rows past the last for an error.
        "max_q_len": "2" if kind == "spare" else "1",
        "max_seq_len": str(2 * shape.page_size),
    }
    integers = {
        "seq_lens": str([3, 0][:batch]),
        "block_table": f"[[1, 0]] * {batch}",
        "query_start_loc": str([*range(batch + 1)]),
    }
    scene = {
        "dtype": 'dtype = torch.bfloat16 if device == "cuda" else torch.float32',
        "q": f"q = torch.randn({tokens}, {shape.heads}, {shape.head_dim}, device=device, dtype=dtype)",
    }
    for name in cache:
        # The pages around belong to nobody.
        scene[name] = f"{name} = torch.zeros(6, {shape.page_size}, {dims}, device=device, dtype=dtype)[1:-1]"
        scene[f"{name} content"] = f"{name}[1, :3] = torch.randn(3, {dims}).to(device, dtype)"
    scene |= {
        "out": f"out = q.new_full(({tokens}, {shape.heads}, {shape.value_dim}), float('nan'))",
        "lse": f"lse = torch.full(({tokens}, {shape.heads}), float('nan'), device=device)",
    }
    # An empty request's row may hold what attention to its neighbour's values gives, whatever the keys.
    content = cache[-1:] if kind.startswith("empty") else cache
    needed = {*named, "dtype"} | {f"{name} content" for name in content if name in named}
    lines = []
    if one := [name for name in scalars if name in named]:
        lines.append(f"{', '.join(one)} = {', '.join(scalars[name] for name in one)}")
    if many := [name for name in integers if name in named]:
        values = ", ".join(integers[name] for name in many)
        lines.append("def int32(x): return torch.tensor(x, dtype=torch.int32, device=device)")
        lines.append(f"{', '.join(many)}, = map(int32, ({values},))")
    lines += [line for name, line in scene.items() if name in needed]
    launch = subject.shape.get("planned") or subject.shape.get("prepared")
    if subject.package and launch:
        lines.insert(0, _FIRST)
    if kind == "empty lse":
        return [
            *lines,
            f"lse = {_call(subject)}[1]",
            'assert (lse[1] == float("-inf")).all(), f"expected -inf, got {lse[1][:4]}"',
        ]
    call = _call(subject)
    if case[-1] == "lse":
        call += "[1].clone()"
    elif not subject.package or launch:
        call = f"first({call}).clone()"
    else:
        call += "[0].clone()" if _returns_pair(subject) else ".clone()"
    if kind == "empty":
        return [
            *lines,
            f"got = {call}",
            'assert (got[1] == 0).all(), f"expected 0, got {got[1].flatten()[:4]}"',
        ]
    if spare:
        left = "isnan()" if "out" in named else "eq(0)"
        was = "NaN as before" if "out" in named else "0"
        return [
            *([] if "out" in named else [_DIRTY]),
            *lines,
            f"got = {call}[1:]  # rows past the last of query_start_loc",
            f'assert got.{left}.all(), f"expected {was}, got {{got.flatten()[:4]}}"',
        ]
    return [*lines, f"clean = {call}", *poison, f"got = {call}", _SAME]


def _poison(kind: str, case: tuple[str, ...], cache: list[str]) -> list[str]:
    """What is written to memory that the row must not read."""
    if kind == "table":
        entry = {"-1": "-1", "far": "2**24", str(2**24): "2**24"}.get(case[1], "4")
        return [*(f"{name}._base[[0, -1]] = float('nan')" for name in cache), f"block_table[0, 1] = {entry}"]
    if kind != "tail":
        return []
    fill = _FILLS[case[1]]
    if "tail" not in case[2]:
        return [f"{name}[0] = {fill}" for name in cache]
    places = [cache[0] if case[2].startswith("K") else cache[-1]] if len(cache) == 2 else cache
    return [f"{name}[1, 3:] = {fill}" for name in places]


def _returns_pair(subject: Subject) -> bool:
    """Whether an adapter of ours returns ``out, lse``, by its last statement."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(subject.function)))
    last = [node for node in ast.walk(tree) if isinstance(node, ast.Return)][-1]
    return isinstance(last.value, ast.Tuple)


def _routing(subject: Subject, case: tuple[str, ...]) -> list[str]:
    experts, top_k = subject.shape.get("experts", 16), subject.shape.get("top_k", 4)
    odd = {
        "all NaN": 'router_logits[0] = float("nan")',
        "one NaN": 'router_logits[0, 5] = float("nan")',
        "a NaN in the first column": 'router_logits[0, 0] = float("nan")',
        "half NaN": 'router_logits[0, ::2] = float("nan")',
        "all -inf": 'router_logits[0] = float("-inf")',
        "all +inf": 'router_logits[0] = float("inf")',
        "one +inf": 'router_logits[0, 3] = float("inf")',
        "all of the bias NaN": 'bias[:] = float("nan")',
        "one NaN in the bias": 'bias[0] = float("nan")',
    }.get(case[-1])
    if odd is None:
        return []
    return [
        f"top_k, is_padding, router_logits = {top_k}, None, torch.randn(1, {experts}, device=device)",
        f"bias = torch.zeros({experts}, device=device)",
        odd,
        f"weights, ids = {_call(subject)}",
        f"right = len(set(ids[0].tolist())) == {top_k} and ((ids >= 0) & (ids < {experts})).all()",
        f'assert right, f"expected {top_k} distinct ids below {experts}, got {{ids.tolist()}}"',
    ]


def _rows(subject: Subject, case: tuple[str, ...]) -> list[str]:
    hidden = subject.shape.get("hidden", 64)
    make = f"x = torch.randn(2, {hidden}, device=device)"
    first = f"got = {_call(subject, x='x.clone()')}"
    if case[0] == "rows":
        fill = {"nan": 'float("nan")', "inf": 'float("inf")', "largest": "3e38"}.get(case[1], "100 * x[1]")
        return [
            make,
            "x[1] *= 4  # a scale that rows share is the second row's",
            first.replace("got", "clean"),
            f"x[1] = {fill}",
            first,
            f"clean, got = {_FIRST_OF_BOTH}",
            "got, clean = got[0].float(), clean[0].float()",
            _SAME,
        ]
    if case[0] == "behind" and case[-1] == "x":
        byte = "0xff" if case[1] == "0xff" else "0x7f"
        calls = (_call(subject, x=f"behind(x, {at})") for at in ("0x00", byte))
        both = f"clean, got = {', '.join(calls)}"
        return [*_BEHIND, make, both, f"clean, got = {_FIRST_OF_BOTH}", _SAME]
    return []


def _ragged(subject: Subject, case: tuple[str, ...]) -> list[str]:
    hidden = subject.shape.get("hidden", 64)
    lines = [
        f"x = torch.randn(4, {hidden}, device=device)",
        "starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)",
    ]
    if case[0] == "spare":
        return [
            _DIRTY,
            *lines,
            f"got = {_call(subject)}",
            'assert (got[2:] == 0).all(), f"expected 0, got {got[2].flatten()[:4]}"',
        ]
    if case[0] == "starts":
        return [
            *lines,
            _call(subject),
            "starts.copy_(torch.tensor([0, 1, 4]))",
            f"got, fresh = {_call(subject)}, {_call(subject, starts='starts.clone()')}",
            'assert torch.equal(got, fresh), f"expected {fresh.flatten()[:4]}, got {got.flatten()[:4]}"',
        ]
    return []


def _merge(subject: Subject, case: tuple[str, ...]) -> list[str]:
    both = case[1] != "nan"
    # Compiled kernels are asked in the probe's dtype: FlashInfer's has no float32.
    cast = ".bfloat16()" if subject.needs == "cuda" else ""
    parts = f"torch.randn(2, 1, 2, {subject.shape.get('head_dim', 32)}, device=device){cast}.unbind()"
    return [
        f"out_a, out_b = {parts}",
        "lse_a, lse_b = torch.zeros(2, 1, 2, device=device).unbind()",
        'lse_a[:] = float("-inf")  # this part saw no keys',
        f"out_a[:] = {0.0 if both else 'float(' + repr('nan') + ')'}",
        *(['lse_b[:], out_b[:] = float("-inf"), 0.0  # nor did this one'] if both else []),
        f"got = {_call(subject)}",
        "got = got[0] if isinstance(got, tuple) else got",
        f"right = torch.allclose(got{cast and '.float()'}, out_b{cast and '.float()'}, atol=1e-2)",
        'assert right, f"expected {out_b.flatten()[:4]}, got {got.flatten()[:4]}"',
    ]


def _kv_write(subject: Subject, case: tuple[str, ...]) -> list[str]:
    heads, dim = subject.shape.get("kv_heads", 2), subject.shape.get("head_dim", 32)
    pad = subject.shape.get("pad_slot", -1)
    return [
        f"key, value = torch.randn(2, 2, {heads}, {dim}, device=device).unbind()",
        f"k_cache, v_cache = torch.zeros(2, 4, 16, {heads}, {dim}, device=device).unbind()",
        'key[1] = value[1] = float("nan")  # a row of padding',
        f"slot_mapping = torch.tensor([17, {pad}], device=device)",
        _call(subject),
        "finite = k_cache.isfinite().all() and v_cache.isfinite().all()",
        f'assert finite, f"expected 0 in slot {pad}, got {{k_cache.flatten(0, 1)[{pad}, 0, :4]}}"',
    ]


def _experts(subject: Subject, case: tuple[str, ...]) -> list[str]:
    hidden, inner = subject.shape.get("hidden", 32), subject.shape.get("inner", 16)
    experts, top_k = subject.shape.get("experts", 4), subject.shape.get("top_k", 2)
    odd = [0] if case[0] == "repeated" else [experts if case[1] == "experts" else int(case[1])]
    ids = [[0, *odd * (top_k - 1)]]
    if subject.needs:
        # The ids of the probe: what one token's id spoils in a compiled kernel is another token's row.
        ids = [row[:top_k] for row in ([0, 1, 4], [2, 3, 5], [1, 2, 6], [3, 0, 7], [0, 2, 4])]
        ids[1] = ([2] if case[0] == "repeated" else odd) * top_k
        ids[3] = odd * top_k if case[0] == "repeated" else ids[3]
    makes = f"(({len(ids)}, {hidden}), 1), (({experts}, {2 * inner}, {hidden}), {hidden**0.5:.0f}), "
    makes += f"(({experts}, {hidden}, {inner}), {inner**0.5:.0f})"
    named = f"topk_ids.clamp(0, {experts - 1})"
    return [
        'dtype = torch.bfloat16 if device == "cuda" else torch.float32',
        f"x, w1, w2 = ((torch.randn(size, device=device) / by).to(dtype) for size, by in ({makes}))",
        f"topk_ids = torch.tensor({ids}, device=device)",
        f"topk_weights = ({named} == topk_ids) / {top_k}  # an id out of range has weight 0",
        "torch.full((2**26,), 0x7F7F7F7F, dtype=torch.int32, device=device)  # what freed memory holds"
        if subject.needs and case[0] == "repeated"
        else "",
        f"got = {_call(subject)}.float()",
        'gate, up = torch.einsum("eih,th->tei", w1.float(), x.float()).chunk(2, -1)',
        'each = torch.einsum("ehi,tei->teh", w2.float(), torch.nn.functional.silu(gate) * up)',
        f"right = (each[torch.arange({len(ids)})[:, None], {named}] * topk_weights[..., None]).sum(1)",
        "off = ~torch.isclose(got, right, rtol=3e-2, atol=3e-2)",
        'assert not off.any(), f"expected {right[off][:4]}, got {got[off][:4]}"',
    ]


_SCENES: dict[str, Callable[[Subject, tuple[str, ...]], list[str]]] = {
    "attention": _attention,
    "routing": _routing,
    "rows": _rows,
    "ragged": _ragged,
    "merge": _merge,
    "kv_write": _kv_write,
    "experts": _experts,
}


# Kind -> the cases that its scene shows, where that looks at none.
_SHOWN = {"merge": ("merge",), "kv_write": ("slot",), "experts": ("repeated", "range")}


def counterexample(subject: Subject, release: Release, clause: str, case: Sequence[str]) -> str:
    """The script, or ``""`` where none of under 30 lines shows the case.

    Args:
        subject: the kernel.
        release: of its package.
        clause: that it breaks.
        case: the input that shows it, as the probe names it.
    """
    make = _SCENES.get(subject.kind)
    if not case or make is None or case[0] not in _SHOWN.get(subject.kind, case[:1]):
        return ""
    scene = [line for line in make(subject, tuple(case)) if line]
    if not scene:
        return ""
    sentence = f"Clause {clause}: {CLAUSES[clause]}"
    head = environments.head(subject, release.version, sentence, environments.here())
    for short in (False, True):
        body = [*_prologue(subject), *_source(subject, short=short), "torch.manual_seed(0)", *scene]
        if len(lines := head + body) <= LINES:
            return "\n".join(lines) + "\n"
    return ""


def counterexamples(
    subject: Subject, release: Release, clause: str, case: Sequence[str] = ()
) -> tuple[str, ...]:
    """Scripts that may show a break: that of the case, or without one those of :data:`CASES`."""
    cases = (case,) if case else CASES.get(clause, ())
    made = (counterexample(subject, release, clause, one) for one in cases)
    return tuple(text for text in made if text)


# --- Running them


def run_alone(text: str, folders: Sequence[str]) -> None:
    """In a child: run a script as the main program, from a folder of its own.

    Args:
        text: of the script.
        folders: what is importable beside what is installed.
    """
    installed = {sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib", "platstdlib")}
    sys.path[:] = [*folders, *(p for p in sys.path if any(p.startswith(place) for place in installed))]
    os.environ.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        file = Path(folder, "counterexample.py")
        file.write_text(text)
        exec(compile(text, str(file), "exec"), {"__name__": "__main__"})


def shows(note: str, ended: children.Ended) -> bool:
    """Whether a script shows what the note of its row says."""
    if ended.code is None:
        return note.startswith(TIMED_OUT)
    if ended.code < 0:
        return "ended its process" in note
    said = re.search(r"raises (\w+)", note)
    # torch writes advice behind an error of CUDA.
    raised = said is not None and re.search(rf"^[\w.]*\b{said[1]}: ", ended.stderr, re.MULTILINE)
    return bool(ended.code) and bool(raised or "\nAssertionError: expected " in ended.stderr)


def tried(said: Reading, texts: Sequence[str], subject: Subject, release: Release, limit_s: float) -> Reading:
    """The answer with the first of these scripts that shows it; each is run.

    One that lacks a module here is kept, and says so: what it needs is in its first lines.
    """
    folders = [] if release.folder is None else [str(release.folder)]
    if subject.package in ("", "staleproof"):
        folders.append(str(Path(__file__).parents[2]))
    for text in texts:
        ended = children.call(run_alone, text, folders, timeout_s=limit_s + 60)
        if shows(said.note, ended):
            return replace(said, script=text)
        if ended.code and re.match(r"(ModuleNotFound|Import)Error: ", ended.last_line) and subject.package:
            first, rest = text.split("\n", 1)
            return replace(said, script=f"{first} Not run where it was made.\n{rest}")
    return said
