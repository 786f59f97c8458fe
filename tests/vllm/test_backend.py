"""The plugin's offer of an attention backend, on a made-up registry."""

import importlib

import pytest

from staleproof.vllm import backend, hooks
from staleproof.vllm.sources import Sources

REGISTRY = """
import enum

TAKEN = {}

class AttentionBackendEnum(enum.Enum):
    TRITON_MLA = "vllm.triton"
    CUSTOM = None

    def get_path(self, include_classname=True):
        return TAKEN.get(self, self.value)

    def is_overridden(self):
        return self in TAKEN

def register_backend(backend, class_path=None, is_mamba=False):
    TAKEN[backend] = class_path
"""
LAYER = """
class QueryLenSupport: pass
class MLACommonBackend: pass
class MLACommonMetadataBuilder: pass
class MLACommonImpl:
    def __init__(self): pass
"""


@pytest.fixture(name="sources")
def sources_fixture(made_up):
    names = {backend.REGISTRY: REGISTRY, backend.LAYER: LAYER}
    yield Sources(made_up({name.removeprefix("vllm."): text for name, text in names.items()}))
    hooks.unwrap(backend.BACKEND)


def test_custom_is_our_backend_and_others_stay(sources):
    backend.offer("0.28.0", sources)
    names = importlib.import_module(backend.REGISTRY).AttentionBackendEnum
    assert names.CUSTOM.get_path() == backend.PATH
    assert names.TRITON_MLA.get_path() == "vllm.triton"


def test_another_packages_custom_backend_stays(sources):
    module = importlib.import_module(backend.REGISTRY)
    module.register_backend(module.AttentionBackendEnum.CUSTOM, "theirs.Backend")
    backend.offer("0.28.0", sources)
    assert module.AttentionBackendEnum.CUSTOM.get_path() == "theirs.Backend"


@pytest.mark.parametrize(("version", "removed"), [("0.21.0", ""), ("0.28.0", "class MLACommonBackend: pass")])
def test_release_without_the_classes_is_refused_with_a_reason(sources, version, removed, caplog):
    file = sources.package / "model_executor/layers/attention/mla_attention.py"
    file.write_text(file.read_text().replace(removed, "") if removed else file.read_text())
    backend.offer(version, sources)
    names = importlib.import_module(backend.REGISTRY).AttentionBackendEnum
    assert names.CUSTOM.get_path() is None
    assert backend.unavailable_reason(version, sources) in caplog.text
