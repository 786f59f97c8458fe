"""The patch beside a connector of vLLM's own: the whole of vLLM 0.33.0, its classes, no stand-in."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
import warm

DRAFT = ROOT / "workbook/upstream/vllm-published-before-written.md"
FAILS = "AssertionError: 256 tokens are computed, and the prefix cache gives 288"
STEPS_BACK = "unpublish: a KV connector is configured, vLLM's own code runs"
CONNECTOR = (
    "kv_transfer_config=KVTransferConfig(kv_connector='ExampleConnector', kv_role='kv_both', "
    "kv_connector_extra_config={'shared_storage_path': str(folder / 'kv')})"
)


@pytest.mark.slow
@pytest.mark.parametrize("connector", [False, True])
def test_beside_a_real_connector_vllms_own_code_runs(connector):
    """Alone, the patch mends the draft's script; beside a connector it says once that it steps back."""
    (script,) = re.findall(r"^```python\n(.*?)^```", DRAFT.read_text(), re.MULTILINE | re.DOTALL)
    device = "device_config=DeviceConfig"
    assert device in script
    if connector:
        script = script.replace(device, f"{CONNECTOR}, {device}")
    lines = [
        "from vllm.config import KVTransferConfig",
        "from staleproof.vllm.plugin import patches",
        "applied = patches()['unpublish'].applied('0.33.0')",
        "applied.__enter__()",
    ]
    found = warm.released("0.33.0", "-c", "\n".join([*lines, script]))
    said = found.stdout + found.stderr
    assert (found.returncode != 0) == connector, said[-2000:]
    assert said.count(STEPS_BACK) == connector
    assert (FAILS in said) == connector
