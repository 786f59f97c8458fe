"""Rules of the source without which it runs as well on a CPU and under Triton's interpreter."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src/staleproof"
LOADS = {"tl.load", "gl.load"}
FACTORIES = {
    f"torch.{name}" for name in ("arange", "empty", "eye", "full", "linspace", "ones", "tensor", "zeros")
}
FACTORIES |= {f"torch.rand{kind}" for kind in ("", "int", "n", "perm")}
# Tensors that stay on the host, or go to the device later, by file: what names no device is on the CPU.
ON_THE_HOST = {
    "cases/measure.py": 1,
    "contract/attention_probes.py": 1,
    "contract/row_probes.py": 2,
    "contract/scenes.py": 6,
    "incidents/decode_buffer/released.py": 6,
    "incidents/kv_reuse/broken.py": 3,
    "incidents/mla_padding/scene.py": 5,
    "incidents/mxfp4_scales/broken.py": 6,
    "incidents/mxfp4_scales/questions.py": 1,
    "incidents/mxfp4_scales/weights.py": 1,
    "incidents/mxfp4_scales/pictures.py": 1,
    "incidents/mxfp4_scales/scene.py": 3,
    "incidents/scale_padding/broken.py": 1,
    "incidents/scale_padding/correct.py": 2,
    "incidents/scale_padding/ids.py": 1,
    "kernels/references.py": 1,
    "ops/nvfp4_layout.py": 1,
    "ops/private.py": 1,
}


# Dataclasses that are filled in or counted with, by file. Whoever adds one says here that it is its own.
CHANGED = {
    "contract/scenes.py": ["Call"],
    "evidence/allocations.py": ["Allocation", "OwnedAllocations"],
    "evidence/ledger.py": ["_Entered"],
    "evidence/tenancy.py": ["_Tenancy", "_Owner"],
    "incidents/decode_buffer/allocator.py": ["_Block", "_Segment"],
    "incidents/kv_reuse/scheduler.py": ["_Running"],
    "incidents/mla_padding/scene.py": ["AttentionInputs", "Variant"],
    "incidents/published_unwritten/scene.py": ["_Request", "Miniature"],
    "incidents/scale_padding/remedies.py": ["Server"],
    "report/html.py": ["Picture", "Section", "Chapter"],
    "triage/facts.py": ["Facts"],
    "vllm/live.py": ["Here"],
    "vllm/sources.py": ["Sources"],
}


@cache
def found() -> tuple[list[tuple[str, ast.Call, str, set[str | None], bool]], dict[str, list[str]]]:
    """Each call in the sources, and the dataclasses that are not frozen, by file.

    Of a call: file, call, function, names given, whether e.g. ``.to(device)`` follows.
    """
    calls, changed = [], {}
    for path in sorted(SOURCE.rglob("*.py")):
        file, tree = str(path.relative_to(SOURCE)), ast.parse(path.read_text())
        followed = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                names = {keyword.arg for keyword in node.keywords}
                calls.append((file, node, dotted(node.func), names, id(node) in followed))
            elif isinstance(node, ast.ClassDef):
                made = map(ast.unparse, node.decorator_list)
                if any(each.startswith("dataclass") and "frozen=True" not in each for each in made):
                    changed.setdefault(file, []).append(node.name)
    return calls, changed


def dotted(function: ast.Attribute) -> str:
    return f"{function.value.id}.{function.attr}" if isinstance(function.value, ast.Name) else ""


def test_a_masked_load_names_the_value_outside_its_mask():
    """Compiled code has any value there; the interpreter has 0."""
    masked = [
        (file, call, names) for file, call, name, names, _ in found()[0] if name in LOADS and "mask" in names
    ]
    assert len(masked) > 40
    assert not [(file, call.lineno) for file, call, names in masked if "other" not in names]


def test_a_tensor_is_made_on_the_device_of_its_neighbours():
    made = [(file, names, followed) for file, _, name, names, followed in found()[0] if name in FACTORIES]
    assert sum("device" in names for _, names, _ in made) > 200
    host = (file for file, names, followed in made if not followed and not names & {"device", "generator"})
    assert Counter(host) == ON_THE_HOST


def test_a_dataclass_is_frozen_unless_it_is_named_here():
    """A dataclass is a value: caches, cases and threads share it, and none can change it for the others."""
    assert found()[1] == CHANGED
