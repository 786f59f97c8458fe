"""A made-up vLLM for a test: one to import, or one that is installed."""

import importlib.util
import sys

import made_up
import pytest

from staleproof.vllm import hooks, live, plugin, standing
from staleproof.vllm.standing import registry


@pytest.fixture(autouse=True)
def _what_is_said_once_is_said_in_each_test():
    hooks._warned.clear()


@pytest.fixture(autouse=True)
def _plugin_leaves_no_server_behind(monkeypatch):
    """Who registers the plugin makes this process a server, which the next test and its children are not."""
    monkeypatch.setattr(live, "_here", [])
    monkeypatch.setenv(live.FOLDER, "")
    monkeypatch.delenv(live.FOLDER)


@pytest.fixture(name="made_up")
def made_up_fixture(tmp_path):
    """Writes a package ``vllm``; its argument maps a module's name below ``vllm`` to the module's text.

    Whatever a test has wrapped is unwrapped at its end, and nothing of the hooks is left then.
    """
    before = [*sys.meta_path]
    with made_up.made_up(tmp_path) as write:
        yield write
        for owner in [*registry.patches]:
            hooks.unwrap(owner)
    assert (sys.meta_path, hooks._watched, registry.out_of_service()) == (before, {}, {})


@pytest.fixture(name="installed")
def installed_fixture(tmp_path, monkeypatch):
    """Installs a made-up vLLM: its version, or ``None`` for no metadata; its modules, or none at all."""
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("a vLLM is installed here, and would be found beside the one made up")

    def make(version, modules):
        if modules is not None:
            made_up.write(tmp_path, modules)
        if version is not None:
            info = tmp_path / f"vllm-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        importlib.invalidate_caches()
        return tmp_path

    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (plugin.VARIABLE, plugin.UNKNOWN, "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    yield make
    hooks.unwrap(standing.REPORT)
    assert not hooks._watched
