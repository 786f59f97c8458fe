"""The patch for SGLang: when it refuses, and what a failing hook does. Incident 1 runs released merges."""

import logging
import sys
from types import SimpleNamespace as Space

import pytest
import torch

from staleproof import sglang

KERNEL = """
def _correct_attn_cp_out_kernel(outputs_ptr):
    output = output * factor
"""
MERGES = "".join(f"def {name}(cp_attn_out, cp_attn_lse, cp_group): pass\n" for name in sglang.FUNCTIONS)


@pytest.fixture(name="package")
def package_fixture(tmp_path, monkeypatch):
    """A made-up SGLang's folder; its registry keeps what is registered in ``hooks``."""
    for path, text in {sglang.KERNELS: KERNEL, sglang.COMM: MERGES}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    hooks = {}
    registry = Space(register=lambda target, hook, kind: hooks.update({target: (hook, kind)}))
    module = Space(HookRegistry=registry, HookType=Space(BEFORE="before"))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", module)
    monkeypatch.setattr(sglang, "_failed", [])
    monkeypatch.delenv("STALEPROOF_PATCHES", raising=False)
    monkeypatch.delenv("STALEPROOF_UNKNOWN", raising=False)
    return Space(folder=tmp_path, hooks=hooks)


def test_known_release_with_the_defect_gets_both_hooks(package):
    sglang.register("0.5.23", package.folder)
    assert package.hooks == {
        f"sglang.srt.layers.dcp.comm.{name}": (sglang._clear, "before") for name in sglang.FUNCTIONS
    }


@pytest.mark.parametrize(
    ("path", "old", "new", "why"),
    [
        (
            sglang.KERNELS,
            "factor\n",
            "factor\n    tl.where(factor == 0.0, 0.0, output)\n",
            "not needed: sglang/",
        ),
        (sglang.KERNELS, "def _", "def other_", "has no _correct_attn_cp_out_kernel"),
        (sglang.COMM, "cp_attn_out, ", "", "takes (cp_attn_lse, cp_group), not what was expected"),
        (sglang.COMM, "dcp_a2a", "a2a", "has no dcp_a2a_lse_reduce"),
    ],
    ids=["guarded", "no kernel", "other arguments", "no merge"],
)
def test_other_source_is_refused_in_one_line(package, caplog, path, old, new, why):
    file = package.folder / path
    file.write_text(file.read_text().replace(old, new))
    sglang.register("0.5.23", package.folder)
    assert package.hooks == {}
    (line,) = caplog.messages
    assert why in line
    assert "vllm" not in line


def test_unknown_release_is_refused_unless_it_is_to_be_probed(package, caplog, monkeypatch):
    sglang.register("0.5.24", package.folder)
    assert package.hooks == {}
    assert "SGLang 0.5.24 is not 0.5.23" in caplog.text
    monkeypatch.setenv("STALEPROOF_UNKNOWN", "probe")
    sglang.register("0.5.24", package.folder)
    assert len(package.hooks) == 2


def test_patches_none_and_no_sglang_leave_everything_as_it_is(package, caplog, monkeypatch):
    sglang.register()
    monkeypatch.setenv("STALEPROOF_PATCHES", "none")
    sglang.register("0.5.23", package.folder)
    assert package.hooks == {}
    assert [line.rpartition(": ")[2] for line in caplog.messages] == [
        "no SGLang is installed",
        "off by STALEPROOF_PATCHES",
    ]


def test_failing_hook_steps_back_and_logs_once(package, caplog):
    """An output that cannot be masked: both calls go on, the second without a try."""
    sglang.register("0.5.23", package.folder)
    caplog.clear()
    out, lse = torch.ones(2, 1, 4), torch.zeros(3)
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert sglang._clear(out, lse, None) is None
    assert out.eq(1).all()
    (line,) = caplog.messages
    assert "dcp_merge stepped back" in line
