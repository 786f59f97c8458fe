"""Patches against the real code of each affected vLLM, on a CPU, one process a release.

Each release's checks ran without the patches, with them and without again. A release that cannot be
fetched is skipped, and counted as skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environment
import pytest
import warm
from tools import vllm_table as tables

from staleproof.vllm import plugin as vllm_plugin
from staleproof.vllm import process, releases
from staleproof.vllm import sources as sources_module
from staleproof.vllm.hooks import Target

pytestmark = pytest.mark.slow
CHECKS = Path(__file__).with_name("real_checks.py")
# The patches that apply to the oldest release.
OF_0_16_0 = "dcp_merge", "mxfp4_scale_tail", "unpublish", "uniform_decode", "one_token_prompt"


def _expected_states(version: str) -> dict[str, str]:
    recorded = releases.table()[version]
    return {
        name: "not needed"
        if not recorded[name]["needed"]
        else "will be patched"
        if patch.applies_to(version)
        else "refused"
        for name, patch in vllm_plugin.patches().items()
    }


@pytest.mark.parametrize("version", environment.also(*environment.TESTED))
def test_every_incident_of_this_vllm_is_gone(version):
    seen = warm.answer(warm.released(version, str(CHECKS)))
    states = _expected_states(version)
    assert seen["version"] == version
    assert seen["decisions"] == states
    off, on = seen["off"], seen["on"]
    # Off, on, off: what the patches changed comes back without them.
    assert seen["off again"] == off

    patched = {name for name, state in states.items() if state == "will be patched"}
    changed = {"undrained_ids": "leak", "staging_race": "race", "dummy_slots": "dummy run"}
    changed |= {"hash_topk_nan": "hash routing", "duplicate_experts": "fused MoE"}
    changed |= {"scale_padding": "fp4 scales, traced"}
    for patch, question in changed.items():
        assert patch in patched or off[question] == on[question], question
    _loads(seen, version, patched)
    _rows(off, on, "decode_buffer" in patched)
    _blocks(off, on, patched)
    _routes(off, on, patched, version >= "0.28")
    # Outside of a graph only a kernel that writes the padding gets this memory.
    assert off["fp4 scales"] == on["fp4 scales"]
    if "scale_padding" in patched:
        traced = "fp4 scales, traced"
        assert (off[traced]["stale"], on[traced]["stale"]) == (128, 0)
        # Shape and dtype are what the quantising op expects.
        assert off[traced] | {"stale": 0} == on[traced]

    _manners(seen, patched)


def _loads(seen: dict[str, Any], version: str, patched: set[str]) -> None:
    load = seen["load"]
    assert load["imported"] == []
    assert not load["cuda"]
    assert load["watching"]
    *refused, line = load["lines"]
    assert len(refused) == ("refused" in seen["decisions"].values())
    assert line.startswith(f"staleproof on vLLM {version}: will be patched: mla_padding")
    assert seen["loaders"]
    # One line a patch, beside the one of the load.
    placed = [line.split()[1] for line in seen["lines"] if "is in place" in line]
    assert sorted(placed) == sorted(patched)


def _rows(off: dict[str, Any], on: dict[str, Any], kept: bool) -> None:
    assert off["Triton MLA"]["bad"] == [3, 5]
    assert on["Triton MLA"] == off["Triton MLA"] | {"bad": []}
    assert on["Triton MLA"]["empty_sum"] == 0
    assert on["Triton MLA"]["empty_lse"] == [float("-inf")]
    for name in ("CUTLASS MLA", "CUTLASS MLA, 16 heads", "FlashInfer MLA"):
        # 0.18.0 to 0.19.1 have the first cure: clean rows, and a buffer a layer.
        assert off[name]["bad"] == ([] if kept else [3, 5])
        assert off[name]["kept"] is kept
        assert on[name] == off[name] | {"bad": [], "kept": False}
    several = off["FlashInfer MLA, q_len 4"]
    assert several["bad"][:8] == [12, 13, 14, 15, 20, 21, 22, 23]
    assert on["FlashInfer MLA, q_len 4"] == several | {"bad": []}
    if "FlashInfer MLA, ragged" in off:
        assert off["FlashInfer MLA, ragged"]["bad"] == [7, 8]
        assert on["FlashInfer MLA, ragged"] == off["FlashInfer MLA, ragged"] | {"bad": []}
        assert on["FlashInfer MLA, ragged"]["live"] == 7


def _blocks(off: dict[str, Any], on: dict[str, Any], patched: set[str]) -> None:
    assert on["leak"] == [0, 0, 0]
    assert "undrained_ids" not in patched or off["leak"] == [200, 400, 600]
    assert on["hybrid"] == off["hybrid"]
    assert [len(ids) for ids in on["hybrid"]["asked"]] == [6, 2]
    assert on["hybrid"]["pending"] == 0
    assert bool(off["hybrid MLA"]["asked"]) is ("mla_recording" not in patched)
    assert on["hybrid MLA"] == on["hybrid"]
    # From 0.26.0 on one buffer a batch in flight, from 0.27.0 on none.
    assert on["race"] in (([[1, 2], [8, 9]],) if "staging_race" in patched else (None, [[1, 2], [8, 9]]))
    assert "staging_race" not in patched or off["race"] == [[8, 9], [8, 9]]
    assert off["zeroed"] == {"attention": [3, 5], "mla": [] if "mla_zeroing" in patched else [3, 5]}
    assert on["zeroed"] == {"attention": [3, 5], "mla": [3, 5]}
    assert on["dummy run"]["dummy"][:8] == [-1] * 8
    if "dummy_slots" in patched:
        assert (off["dummy run"]["dummy"], on["dummy run"]["dummy"]) == ([7] * 16, [-1] * 16)
    assert on["dummy run"]["real"] == off["dummy run"]["real"]


def _routes(off: dict[str, Any], on: dict[str, Any], patched: set[str], clamps_hash: bool) -> None:
    unclamped = "topk_nan" in patched
    repeated = ("softmax", "sigmoid", "grouped")
    assert [off["routing"][k] for k in repeated] == ([2, 1, 1] if unclamped else [0, 0, 0])
    biased = [k for k in off["routing"] if "bias" in k]
    assert [off["routing"][k] for k in biased] == [6, 6, 6]
    assert not any(on["routing"].values())
    assert (off["routing, traced"], on["routing, traced"]) == (2 if unclamped else 0, 0)
    assert (off["hash routing"] is not None) is ("hash_topk_nan" in patched)
    if "hash_topk_nan" in patched:
        assert off["hash routing"]["logits"] == (0 if clamps_hash else 1)
        assert off["hash routing"]["bias"] == 6
        assert not any(on["hash routing"].values())
    if "duplicate_experts" in patched:
        assert off["fused MoE"]["ids"] == [[3, 1, 3], [0, 1, 2]]
        assert on["fused MoE"]["ids"] == [[3, 1, -1], [0, 1, 2]]
        assert on["fused MoE"]["weights"][0] == pytest.approx([0.6, 0.3, 0.0])
        assert on["fused MoE"]["weights"][1] == off["fused MoE"]["weights"][1]
    assert (off["simulator"]["dtype"], on["simulator"]["dtype"]) == ("torch.int64", "torch.int32")
    assert off["simulator"]["normal"] > 0.15
    assert on["simulator"]["normal"] == on["simulator"]["uniform"] == 0
    assert on["simulator"]["uniform range"] is on["simulator"]["normal range"] is True


def _manners(seen: dict[str, Any], patched: set[str]) -> None:
    assert seen["idempotent"] is seen["reverted"] is seen["finder gone"] is True
    contained = seen["contained"]
    # vLLM's own rows, twice, and one line a failure.
    assert contained["rows"] == [seen["off"]["CUTLASS MLA"]["bad"]] * 2
    assert contained["routing"] == seen["off"]["routing"]["softmax"]
    assert contained["asked"] == len(contained["lines"])
    assert len(contained["lines"]) == len(set(contained["lines"]))
    # Beside the MLA kernel's, that of the patch whose selection replaces vLLM's.
    assert len(contained["lines"]) == 1 + bool(patched & {"topk_nan", "topk_nan_bias"})
    assert all("planted" in line and "vLLM's own code runs" in line for line in contained["lines"])


@pytest.mark.parametrize("version", environment.also(*environment.READ))
def test_the_table_says_what_the_sources_say(version, monkeypatch):
    sources = tables.sources_of(environment.sources(version))
    parsed, whole = [], sources_module._functions
    monkeypatch.setattr(sources_module, "_functions", lambda *a: parsed.append(a[0]) or whole(*a))
    found = tables.probed(sources)
    assert found == releases.table()[version]
    # What the evidence of scale_padding says of the two kernels.
    assert "rowIdx < numRows; rowIdx += gridDim.x" in sources.csrc_text(environment.FUSED_QUANT)
    assert "rowIdx < sf_m; rowIdx += gridDim.x" in sources.csrc_text("nvfp4_quant_kernels.cu")
    # A process says what stands in it after these.
    for place in (process.ENGINE, process.WORKER, process.CPU_WORKER):
        Target(*place, ("self",)).check(sources)
    for patch in vllm_plugin.patches().values():
        needed = found[patch.name]["needed"]
        # The ranges and the probes were written down apart. Of 0.16.0 some are patched.
        later = patch.name not in OF_0_16_0
        unpatched = (version == "0.16.0" and later) or (patch.name == "scale_padding" and version < "0.18")
        assert patch.applies_to(version) == (needed and not unpatched), patch.name
        if patch.applies_to(version):
            patch.check(version, sources)
    # Each process of vLLM pays for this: one file at most, of 1,000 lines, is parsed to its end.
    assert parsed in ([], ["v1/worker/utils.py"])
    # No function is left out that a patch knows, unless another target has the place or it is right as it is.
    for patch in vllm_plugin.patches().values():
        taken = {target.place for target in patch.targets_for(version)}
        for target in patch.targets if patch.applies_to(version) else ():
            right = target.probe is not None and not target.probe(sources).needed
            if target.place not in taken and not right:
                with pytest.raises(sources_module.PatchError):
                    target.check(sources)


def test_each_patch_is_needed_in_a_release_that_is_imported():
    imported = [releases.table()[release] for release in environment.TESTED]
    for patch in vllm_plugin.patches():
        assert any(row[patch]["needed"] for row in imported), patch
    assert {*environment.READ, *environment.TESTED} <= {*releases.table()}
