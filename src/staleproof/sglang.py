"""The ``sglang.srt.plugins`` entry point: one patch for SGLang, of its merge of context-parallel ranks.

SGLang calls :func:`register` in each process. It wraps two functions by SGLang's own registry: rows of a rank
without keys are zeroed before ranks are merged (vLLM #55289). Not covered: an lse that is itself unwritten
but finite, NPUs, and every other incident here. The MHA path clears such rows itself. To leave SGLang as it
is: ``STALEPROOF_PATCHES=none``, or ``SGLANG_PLUGINS`` without this name.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

from staleproof.vllm.arguments import argument
from staleproof.vllm.patches.mla_padding import CORRECT, clear_dead_rows
from staleproof.vllm.sources import PatchError, Sources

logger = logging.getLogger("sglang.staleproof")
# The release that was read and whose kernels ran; another is refused, unless STALEPROOF_UNKNOWN=probe.
RELEASES = ("0.5.23",)
KERNELS, COMM = "kernels/ops/attention/dcp_kernels.py", "srt/layers/dcp/comm.py"
FUNCTIONS = "cp_lse_ag_out_rs_mla", "dcp_a2a_lse_reduce"
_failed: list[str] = []


def installed() -> tuple[str, Path]:
    """Version and folder of the installed SGLang, which is not imported.

    Raises:
        PatchError: none is installed.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise PatchError("no SGLang is installed")
    return importlib.metadata.version("sglang"), Path(next(iter(spec.submodule_search_locations)))


def refusal(version: str, folder: Path) -> str | None:
    """Why nothing is patched, in one line; ``None`` if this SGLang has the defect and is one that we know."""
    if os.environ.get("STALEPROOF_PATCHES", "").strip() == "none":
        return "off by STALEPROOF_PATCHES"
    sources = Sources(folder)
    try:
        kernel = sources.function(KERNELS, CORRECT)
        others = [sources.function(COMM, name) for name in FUNCTIONS]
    except PatchError as error:
        return f"sglang: {str(error).removeprefix('vllm/')}"
    if "output = output * factor" not in kernel.text or "factor == 0" in kernel.text:
        return f"not needed: sglang/{kernel.place} drops rows of weight 0"
    if unlike := [one for one in others if one.arguments[:2] != ("cp_attn_out", "cp_attn_lse")]:
        return f"sglang/{unlike[0].place} takes ({', '.join(unlike[0].arguments)}), not what was expected"
    if version not in RELEASES and os.environ.get("STALEPROOF_UNKNOWN") != "probe":
        return f"SGLang {version} is not {RELEASES[0]}; STALEPROOF_UNKNOWN=probe patches it all the same"
    return None


def _clear(*args: Any, **kwargs: Any) -> None:
    """Before a merge. An error is logged once; from then on SGLang's own code runs."""
    if _failed:
        return
    try:
        clear_dead_rows(argument(args, kwargs, 0, "cp_attn_out"), argument(args, kwargs, 1, "cp_attn_lse"))
    except Exception as error:
        _failed.append(f"dcp_merge stepped back, SGLang's own code runs: {type(error).__name__}: {error}")
        logger.error("staleproof: %s", _failed[0])


def register(version: str | None = None, folder: Path | None = None) -> None:
    """Wrap the merges, or log one line that says why not. Never raises.

    Args:
        version, folder: of an SGLang that is not the installed one.
    """
    try:
        if version is None or folder is None:
            version, folder = installed()
        if why := refusal(version, folder):
            logger.warning("staleproof: dcp_merge: %s", why)
            return
        hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
        for name in FUNCTIONS:
            target = f"sglang.{COMM.removesuffix('.py').replace('/', '.')}.{name}"
            hooks.HookRegistry.register(target, _clear, hooks.HookType.BEFORE)
        logger.info("staleproof: dcp_merge will be in place on SGLang %s", version)
    except Exception as error:
        logger.warning("staleproof: dcp_merge: %s: %s", type(error).__name__, error)
