"""Rules of the source that only a GPU breaks on: the CPU, and Triton's interpreter, run without them too."""

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
    "incidents/mxfp4_scales/cases.py": 1,
    "incidents/mxfp4_scales/pictures.py": 1,
    "incidents/mxfp4_scales/scene.py": 2,
    "incidents/published_unwritten/whole.py": 1,
    "incidents/scale_padding/broken.py": 1,
    "incidents/scale_padding/correct.py": 2,
    "incidents/scale_padding/ids.py": 1,
    "kernels/mxfp4.py": 1,
    "kernels/references.py": 1,
    "ops/nvfp4_layout.py": 1,
    "ops/private.py": 1,
}


@cache
def calls() -> list[tuple[str, ast.Call, str, set[str | None], bool]]:
    """Each call in the sources: file, call, function, names given, whether e.g. ``.to(device)`` follows."""
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        followed = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                names = {keyword.arg for keyword in node.keywords}
                found.append(
                    (str(file.relative_to(SOURCE)), node, dotted(node.func), names, id(node) in followed)
                )
    return found


def dotted(function: ast.Attribute) -> str:
    return f"{function.value.id}.{function.attr}" if isinstance(function.value, ast.Name) else ""


def test_a_masked_load_names_the_value_outside_its_mask():
    """Compiled code has any value there; the interpreter has 0."""
    masked = [
        (file, call, names) for file, call, name, names, _ in calls() if name in LOADS and "mask" in names
    ]
    assert len(masked) > 40
    assert not [(file, call.lineno) for file, call, names in masked if "other" not in names]


def test_a_tensor_is_made_on_the_device_of_its_neighbours():
    made = [(file, names, followed) for file, _, name, names, followed in calls() if name in FACTORIES]
    assert sum("device" in names for _, names, _ in made) > 200
    host = (file for file, names, followed in made if not followed and not names & {"device", "generator"})
    assert Counter(host) == ON_THE_HOST
