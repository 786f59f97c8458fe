"""A dataclass is a value: caches, cases and threads share it, and none can change it for the others."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src/staleproof"
# What is filled in or counted with, by file. Whoever adds one says here that it is nobody else's.
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


def test_a_dataclass_is_frozen_unless_it_is_named_here():
    found: dict[str, list[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                made = map(ast.unparse, node.decorator_list)
                if any(each.startswith("dataclass") and "frozen=True" not in each for each in made):
                    found.setdefault(str(file.relative_to(SOURCE)), []).append(node.name)
    assert found == CHANGED
