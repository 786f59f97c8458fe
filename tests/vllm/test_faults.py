"""A hook of any patch that raises: vLLM's own result comes through, and one line says what stepped back."""

import pytest
from tests.vllm import faults

from staleproof.vllm import standing


def kind(patch, target):
    """What containing a failure depends on: the hooks of a function, whose it is, and when they run."""
    hooks = tuple(hook for hook in ("around", "before", "instead", "after") if getattr(target, hook))
    return hooks, "." in target.name, target.single, patch.traced, patch.on_host, patch.name == standing.CACHE


# One function of each kind, and every patch.
TARGETS = {}
KINDS = set()
for patch, target in faults.targets():
    if not {kind(patch, target), patch.name} <= KINDS:
        KINDS |= {kind(patch, target), patch.name}
        TARGETS[faults.name_of(patch, target)] = (patch, target)
# A function that is wrapped whole, so that a fault can also be planted where the call ends.
AROUND = next(name for name, (_, target) in TARGETS.items() if target.around is not None)
CASES = [
    *(pytest.param(name, "at the first call", id=name) for name in TARGETS),
    *(
        pytest.param(AROUND, name, id=name, marks=[pytest.mark.gpu] if fault.on == "cuda" else [])
        for name, fault in faults.FAULTS.items()
        if name != "at the first call"
    ),
]


@pytest.mark.parametrize(("row", "name"), CASES)
def test_hook_that_raises_changes_no_result_and_is_logged_once(row, name):
    (patch, target), fault = TARGETS[row], faults.FAULTS[name]
    answer = faults.ask(patch, target, fault)
    assert answer.returned == faults.OWN
    (line,) = answer.lines
    assert line.startswith(f"staleproof: {patch.name}: ")
    assert ("vLLM's own code is in the graph" if fault.traced else "vLLM's own code runs: ") in line
    assert line.endswith(f"; out of service: {patch.name}; in service: nothing")
    assert answer.out_of_service == [patch.name]
    kind = "OutOfMemoryError" if "memory" in name else "RuntimeError"
    assert kind in line
