"""Lets vLLM find our MLA decode (:mod:`.mla_backend`) as ``--attention-backend CUSTOM``."""

from __future__ import annotations

import sys

from staleproof.vllm import hooks
from staleproof.vllm.arguments import Arguments, Keywords
from staleproof.vllm.hooks import Target
from staleproof.vllm.sources import PatchError, Sources, file_of, within
from staleproof.vllm.standing import BACKEND, registry

REGISTRY = "vllm.v1.attention.backends.registry"
LAYER = "vllm.model_executor.layers.attention.mla_attention"
PATH = "staleproof.vllm.mla_backend.MLADecodeBackend"
RELEASES = "0.22.1", "0.33.0"


def unavailable_reason(version: str, sources: Sources) -> str | None:
    """Why a release cannot serve with the backend, or ``None``.

    Args:
        version: a release of the table.
        sources: its files.
    """
    if not within(version, RELEASES):
        return f"expected vLLM {RELEASES[0]} to {RELEASES[1]}, got {version}"
    try:
        sources.function(file_of(REGISTRY), "register_backend")
        sources.function(file_of(LAYER), "MLACommonImpl.__init__")
        text = sources.text(file_of(LAYER))
    except PatchError as error:
        return str(error)
    expected = ("class MLACommonBackend", "class MLACommonMetadataBuilder", "class QueryLenSupport")
    absent = [name for name in expected if name not in text]
    return f"vllm/{file_of(LAYER)} has no {absent[0]}" if absent else None


def offer(version: str, sources: Sources) -> None:
    """Offer the backend to this vLLM; nothing of vLLM is imported for it.

    Where it cannot serve, one line of the log says why as soon as a server asks for CUSTOM.
    """
    reason = unavailable_reason(version, sources)

    def register(args: Arguments, kwargs: Keywords) -> None:
        backend = args[0]
        if backend.name != "CUSTOM" or backend.is_overridden():
            return
        if reason is None:
            sys.modules[REGISTRY].register_backend(backend, PATH)
        else:
            hooks.warn_once(f"--attention-backend CUSTOM is not staleproof's MLA decode: {reason}")

    target = Target(REGISTRY, "AttentionBackendEnum.get_path", ("self",), before=register)
    try:
        target.check(sources)
    except PatchError:
        # A release without named backends.
        return
    # That it is offered is no news: vLLM logs the backend that it selects.
    registry.of(BACKEND).announced = True
    hooks.wrap(BACKEND, target)
