"""Write the kernels of the three fixes as files that vLLM could take as they are.

``python -m tools.lift`` takes each kernel, what it uses and its launch from ``src/staleproof/ops``, leaves
out what is ours alone (the registration as an operator, launches that are repeated), and writes one file
into ``workbook/upstream/<fix>/``. Beside it lie, written by hand, the change of vLLM's call site and a test
in vLLM's style. ``tests/ops/test_lifted.py`` compares their results with those of ops, bit by bit.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
OPS = ROOT / "src/staleproof/ops"
UPSTREAM = ROOT / "workbook/upstream"
# vLLM's placeholder stands for Triton where there is none.
HEAD = '''# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""{0.summary}"""

{0.imports}
from vllm.triton_utils import tl, triton

'''
LAUNCHED = re.compile(r"return launched\((\w+), (\w+), (\w+), (\w+), (.*)\)")


class Lift(NamedTuple):
    """One fix as a file of vLLM's.

    Attributes:
        folder: its place in ``workbook/upstream``.
        target: the file's place in vLLM.
        modules: of ops, in the order in which their definitions are written.
        summary: the file's first line.
        imports: beside Triton's.
        entry: what vLLM calls; it names what is taken from the modules.
    """

    folder: str
    target: str
    modules: tuple[str, ...]
    summary: str
    imports: str
    entry: str

    @property
    def path(self) -> Path:
        """The written file."""
        return UPSTREAM / self.folder / Path(self.target).name


LIFTS = (
    Lift(
        "mla-empty-rows",
        "vllm/v1/attention/ops/clear_empty_rows.py",
        ("clear_empty_rows",),
        "Clears the decode output of requests without tokens (CUDA graph padding).",
        "import torch\n",
        '''
def clear_empty_rows(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None = None,
) -> None:
    """Sets the rows of requests with ``seq_lens == 0`` to 0, their lse to -inf.

    A padded decode batch has such requests, and the kernels leave their rows as they were. The lengths are
    read on the device, so a captured graph follows them.

    Args:
        out: [num_tokens, num_heads, head_dim], of 1, 2 or 4 bytes an element; heads side by side.
        lse: [num_tokens, num_heads] float32, or None; heads side by side.
        seq_lens: [num_reqs] int32
        query_start_loc: [num_reqs + 1] int32 where requests have different numbers of query tokens. Rows
            behind the last request are cleared as well.
    """
    if out.numel() > 0:
        _launch(out, seq_lens, query_start_loc, lse)
''',
    ),
    Lift(
        "topk-distinct",
        "vllm/model_executor/layers/fused_moe/router/distinct_topk.py",
        ("routing_kernel", "topk"),
        "Routing whose expert ids are distinct, whatever bits logits and bias hold.",
        "import torch\n",
        '''
INTERPRET = triton.knobs.runtime.interpret


def distinct_topk(
    scoring_func: str,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    is_padding: torch.Tensor | None = None,
) -> None:
    """Writes the best experts of each token, their scores without the bias, and -1 and 0 in padding rows.

    A NaN or an infinity that makes a score NaN counts as 0, and so does a NaN in the bias.

    Args:
        scoring_func: softmax, sigmoid or softplus_sqrt.
        topk_weights: [num_tokens, topk] float32; topk is at most 32.
        topk_ids: [num_tokens, topk] int32 or int64.
        gating_output: [num_tokens, num_experts] float32, float16 or bfloat16, at most 1024 experts.
        renormalize: divide each token's weights by their sum.
        bias: [num_experts], for the choice alone.
        routed_scaling_factor: of the weights.
        is_padding: [num_tokens] bool.
    """
    if len(gating_output) > 0:
        tensors = gating_output, bias, is_padding, topk_weights, topk_ids
        _launch(scoring_func, *tensors, renormalize, routed_scaling_factor, padding_id=-1)
''',
    ),
    Lift(
        "kv-block-zeroing",
        "vllm/v1/worker/zero_kv_blocks.py",
        ("zero_kernel",),
        "Zeroes KV cache blocks in all segments of memory, in one launch.",
        "import torch\n",
        '''
def zero_kv_blocks(
    segments: torch.Tensor, block_ids: torch.Tensor, num_blocks: int, longest: int, aligned: bool
) -> None:
    """Zeroes the bytes of these blocks. Ids that name no block, or the null block 0, are skipped.

    Args:
        segments: [num_segments, 4] int64: address of block 0, bytes from a block to the next, bytes of a
            block, 0. A row of 32 bytes is read in one access.
        block_ids: [n] int32 or int64.
        num_blocks: ids from here on name no block.
        longest: the most bytes of a block in a segment.
        aligned: whether all numbers of ``segments`` are multiples of 16.
    """
    rows, chunks = len(segments), triton.cdiv(longest + (0 if aligned else 15), CHUNK)
    for ids in block_ids.split(MOST):
        _zero_kernel[(chunks, len(ids), rows)](
            segments, ids, len(ids), rows, num_blocks, aligned, CHUNK, 1, num_warps=WARPS
        )
''',
    ),
)


def _named(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    return set().union(*map(_named, node.targets)) if isinstance(node, ast.Assign) else set()


def _text(node: ast.stmt, lines: list[str]) -> str:
    """A definition as it is written, with the comment above it, without what is ours alone."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(one.lineno for one in decorators)]) - 1
    begin = first
    while begin > 0 and lines[begin - 1].startswith("#"):
        begin -= 1
    kept = [*lines[begin:first]]
    for one in decorators:
        if "operator" not in _named(one):
            kept += lines[one.lineno - 1 : one.end_lineno]
    text = "\n".join([*kept, *lines[node.lineno - 1 : node.end_lineno]])
    return LAUNCHED.sub(r"\1[\2](*\3, *\4, \5)", text).replace(" -> Ready | None:", " -> None:")


def lifted(lift: Lift) -> str:
    """The file's text."""
    definitions = []
    for module in lift.modules:
        text = (OPS / f"{module}.py").read_text()
        definitions += [(node, text.splitlines()) for node in ast.parse(text).body if _defined(node)]
    own = set().union(*map(_defined, ast.parse(lift.entry).body))
    wanted, found = _named(ast.parse(lift.entry)) - own, set()
    while wanted - found:
        found |= wanted
        for node, _ in definitions:
            if _defined(node) & found:
                wanted = wanted | (_named(node) - own)
    texts = [(node, _text(node, lines)) for node, lines in definitions if _defined(node) & found]
    written = HEAD.format(lift)
    for node, text in texts:
        written += ("\n\n" if isinstance(node, ast.FunctionDef) else "") + text + "\n"
    return re.sub(r"\n{4,}", "\n\n\n", written + "\n" + lift.entry)


if __name__ == "__main__":
    for one in LIFTS:
        one.path.parent.mkdir(exist_ok=True)
        one.path.write_text(lifted(one))
        print(one.path.relative_to(ROOT))
