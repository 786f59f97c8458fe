"""The patch beside a connector of vLLM's own: the whole of vLLM 0.33.0, no stub."""

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
def test_patch_beside_a_real_connector_steps_back_and_vllms_own_code_runs():
    """The draft's script shows the fault with the patch too, and one line says that it steps back."""
    (script,) = re.findall(r"^```python\n(.*?)^```", DRAFT.read_text(), re.MULTILINE | re.DOTALL)
    device = "device_config=DeviceConfig"
    assert device in script
    lines = [
        "from vllm.config import KVTransferConfig",
        "from staleproof.vllm.plugin import patches",
        "applied = patches()['unpublish'].applied('0.33.0')",
        "applied.__enter__()",
        script.replace(device, f"{CONNECTOR}, {device}"),
    ]
    ended = warm.released("0.33.0", "-c", "\n".join(lines))
    output = ended.stdout + ended.stderr
    assert ended.returncode != 0, output[-2000:]
    assert output.count(STEPS_BACK) == 1
    assert FAILS in output
