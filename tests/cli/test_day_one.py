"""``staleproof record`` on a B200, rehearsed with a stand-in: FlashInfer's own checks, no SM100 kernel.

The stand-ins behind FlashInfer's Python do what ``workbook/sm100-sources.md`` says of the kernels: an
empty row is not stored, and the last tile's values are multiplied by weights of 0.
"""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from fakes import one_line

from staleproof import device
from staleproof.cases import predictions, store
from staleproof.cases.case import each
from staleproof.cases.run import Table
from staleproof.cli import app as cli
from staleproof.device import Machine, Provenance
from staleproof.incidents.kv_reuse import attention
from staleproof.incidents.moe_routing import fused_moe
from staleproof.incidents.registry import INCIDENTS
from staleproof.kernels import mla
from staleproof.report import charts, plots, show

B200 = Machine(
    "NVIDIA B200", "cuda", "sm_100", 178.4, "580.95", "3.12.3", "2.11.0", "3.6.0", "0.6.18.post1", None
)
CORE = pytest.importorskip("flashinfer.mla._core")
SM100_PEERS = ("flashinfer_cutlass", "flashinfer_trtllm")
ON_THE_HOST = pytest.mark.skipif(not device.interpreting(), reason="rehearsed on the host")
PREDICTIONS = Path(__file__).parents[2] / "workbook" / predictions.NAME


def _decode(out, q, kv_cache, seq_lens, table, scale):
    """MLA decode over whole tiles of 128 keys; ``out`` (batch, heads, 512), pages of 64."""
    for row, length in enumerate(seq_lens.tolist()):
        if length:
            pages = table[row, : -(-length // 128) * 2].long()
            keys = kv_cache[pages].flatten(0, 1).float()
            scores = q[row].float() @ torch.where(keys.isnan(), 0.0, keys).T * scale
            scores[:, length:] = -torch.inf
            out[row] = scores.softmax(1) @ keys[:, :512]


class Kernels:
    """In place of FlashInfer's compiled modules; checks what the launchers check."""

    def __init__(self) -> None:
        self.failure: Exception | None = None

    def cutlass_mla_paged_attention(self, workspace, out, lse, q, kv_cache, kv_len, page_table, o_scale):
        assert workspace.numel() == 128 * 1024 * 1024
        assert q.shape[1:] == (128, 576)
        assert kv_len.dtype == page_table.dtype == torch.int32
        if self.failure:
            raise self.failure
        _decode(out, q, kv_cache, kv_len, page_table, 192**-0.5)

    def trtllm_paged_attention_decode(self, out, out_scale, query, key_cache, value_cache, *rest):
        workspace, counters, block_tables, seq_lens, max_q_len, max_kv_len, scale = rest[:7]
        assert key_cache.data_ptr() == value_cache.data_ptr()
        assert (max_q_len, max_kv_len) == (1, block_tables.shape[-1] * 64)
        assert counters.dtype == torch.uint8 or counters.dtype == torch.int32
        assert not workspace.any()
        _decode(
            out.view(-1, 128, 512), query.view(-1, 128, 576), key_cache[:, 0], seq_lens, block_tables, scale
        )


@pytest.fixture
def kernels(monkeypatch):
    """FlashInfer as on a B200, down to its compiled modules."""
    found = Kernels()
    for name in ("get_mla_module", "get_trtllm_gen_fmha_module"):
        monkeypatch.setattr(CORE, name, lambda: found)
    monkeypatch.setattr(CORE, "get_compute_capability", lambda device: (10, 0))
    monkeypatch.setattr(CORE, "get_device_sm_count", lambda device: 148)
    monkeypatch.setattr(CORE, "device_support_pdl", lambda device: True)
    monkeypatch.setattr(device, "machine", lambda: B200)
    monkeypatch.setattr(device, "provenance", lambda: Provenance.MEASURED)
    return found


@pytest.fixture
def record(kernels, monkeypatch, tmp_path):
    """Records the questions that need SM100 into a folder, and returns it."""
    from staleproof.incidents.mla_padding import cases

    def _call(device_name, rows, live, tokens):
        call = cases.scene.make_call("cpu", rows=rows, live=live, tokens=tokens)
        q = torch.randn(rows, 128, 576, generator=torch.Generator().manual_seed(2)).to(call.q.dtype)
        return call._replace(q=q)

    found = mla.peers()
    assert [found[name].unavailable_reason for name in SM100_PEERS] == [None, None]
    subjects = {name: found[name] for name in SM100_PEERS}
    table = [
        each(name, words, subjects, partial(cases._asked, ask), reason="nobody has run it")
        for name, (words, ask) in cases.ALONE.items()
    ]
    monkeypatch.setattr(cases, "_call", _call)
    monkeypatch.setattr(cases, "TABLE", Table("mla_padding", *table))
    for name in INCIDENTS.keys() - {"mla_padding"}:
        del INCIDENTS[name]
    checkout = tmp_path / "checkout"
    runs = checkout / "workbook" / "runs"
    shutil.copytree(PREDICTIONS.parent / "runs/nvidia-h200", runs / "nvidia-h200")
    shutil.copy(PREDICTIONS, checkout / "workbook")
    monkeypatch.setattr(store, "checkout", lambda: checkout)

    def run() -> Path:
        assert cli.main(["record", "--out", str(runs), "--device", "cpu"]) == 0
        return runs / "nvidia-b200"

    return run


def test_the_rehearsal_answers_every_question_that_names_sm100_and_compare_and_report_take_it(record, capsys):
    run = store.read(record())
    asked = {found.key[:3] for found in run.findings if found.ran}
    recorded = (PREDICTIONS.parent / "runs/nvidia-h200/findings.jsonl").read_text().splitlines()
    absent = [json.loads(line) for line in recorded if "needs an SM100 GPU" in line]
    assert {(row["incident"], row["question"], row["variant"]) for row in absent} == asked
    capsys.readouterr()
    assert cli.main(["compare", str(run.folder), "--predictions"]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == f"0 refuted, 6 confirmed, {len(predictions.read()) - 6} open"
    assert cli.main(["compare", str(run.folder), "nvidia-h200"]) == 0
    said = capsys.readouterr().out
    assert "only in first   mla_padding, empty row, flashinfer_cutlass" in said
    assert "0 mismatch, 6 only in the first" in said.splitlines()[0]
    assert cli.main(["report"]) == 0
    assert "NVIDIA B200" in Path(capsys.readouterr().out.removeprefix("report: ").strip()).read_text()


def test_a_miss_is_printed_first(record, capsys, monkeypatch):
    mended = Kernels.cutlass_mla_paged_attention

    def zeroes(self, workspace, out, *rest):
        out.zero_()
        mended(self, workspace, out, *rest)

    monkeypatch.setattr(Kernels, "cutlass_mla_paged_attention", zeroes)
    folder = record()
    capsys.readouterr()
    assert cli.main(["compare", str(folder), "--predictions"]) == 1
    counts, _, _, first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "refuted    mla_padding, empty row, flashinfer_cutlass: predicted unwritten, got zero"
    )
    assert counts.startswith("1 refuted, 5 confirmed")


def test_a_kernel_that_fails_is_a_line_and_the_others_answer(record, kernels, capsys):
    kernels.failure = RuntimeError("CUTLASS: Error Internal\n  at launch")
    run = store.read(record())
    assert "Traceback" not in capsys.readouterr().out
    said = {found.key[1:3]: found for found in run.findings}
    failed = said["empty row", "flashinfer_cutlass"]
    assert (failed.ran, failed.note) == (False, "failed: RuntimeError: CUTLASS: Error Internal at launch")
    assert said["empty row", "flashinfer_trtllm"].verdict == "unwritten"


def _cells_of_recorded_runs():
    """Cells of the notebooks that show recorded runs and need no cell before them."""
    for path in sorted((PREDICTIONS.parents[1] / "notebooks").glob("*.ipynb")):
        for index, cell in enumerate(json.loads(path.read_text())["cells"]):
            source = "".join(cell["source"])
            shows = any(call in source for call in ("recorded_", "recorded.read_all", "charts.timed"))
            if cell["cell_type"] == "code" and shows and "TABLE" not in source:
                yield f"{path.stem}[{index}]", source


def test_the_notebooks_show_the_folder(record, capsys, monkeypatch):
    record()
    # Drawing has tests of its own.
    monkeypatch.setattr(charts, "times", lambda *_: None)
    monkeypatch.setattr(plots, "picture", lambda *_: None)
    capsys.readouterr()
    shown = {}
    for name, source in _cells_of_recorded_runs():
        try:
            exec(source, {"show": show, "plots": plots, "display": lambda drawn: None})
        except NameError:
            # It also uses what its notebook obtained before.
            continue
        finally:
            printed = capsys.readouterr().out
        shown[name] = printed
    assert {name[:2] for name in shown} == {"01", "02", "03", "04", "05", "07", "08"}
    of_b200 = {name: text for name, text in shown.items() if "RECORDED NVIDIA B200" in text}
    (table,) = (text for name, text in of_b200.items() if name.startswith("01"))
    mine = table.partition("RECORDED NVIDIA B200")[2].partition("RECORDED")[0]
    assert re.search(r"^flashinfer_cutlass +unwritten$", mine, re.MULTILINE)
    assert re.search(r"^flashinfer_trtllm +unwritten$", mine, re.MULTILINE)


def test_cubins_that_are_missing_are_a_line(record, monkeypatch, tmp_path):
    """FlashInfer's own loader, with nothing in its cache and no network."""
    jit = pytest.importorskip("flashinfer.jit.cubin_loader")
    monkeypatch.setattr(jit, "FLASHINFER_CUBIN_DIR", tmp_path / "cubins")
    monkeypatch.setattr(jit, "download_file", lambda *args, **rest: False)
    monkeypatch.setattr(CORE, "get_trtllm_gen_fmha_module", lambda: CORE.gen_trtllm_gen_fmha_module())
    said = {found.key[1:3]: found for found in store.read(record()).findings}
    missing = said["empty row", "flashinfer_trtllm"]
    assert not missing.ran
    assert missing.note.startswith("failed: AssertionError: Failed to get checksums.txt from ")
    assert one_line(missing.note + "\n")
    assert said["empty row", "flashinfer_cutlass"].verdict == "unwritten"


def test_cubins_of_another_version_are_a_line(kernels, monkeypatch):
    """FlashInfer raises when it is imported beside them, so nothing may import it."""
    versions = {"flashinfer-cubin": "0.6.13", "flashinfer-python": "0.6.18.post1"}
    monkeypatch.setattr(device, "version_of", versions.get)
    monkeypatch.delenv("FLASHINFER_DISABLE_VERSION_CHECK", raising=False)
    why = "flashinfer-python 0.6.18.post1 refuses to be imported beside flashinfer-cubin 0.6.13"
    found = mla.peers()
    for name in (*SM100_PEERS, "flashinfer_fa2"):
        assert found[name].unavailable_reason == why
    assert fused_moe.unavailable_reason("distinct", "cuda") == why
    assert attention._needs_flashinfer("fa2") == why


def test_what_is_not_available_on_a_b200_says_so_in_one_line(kernels):
    assert mla.peers()["flashinfer_fa3"].unavailable_reason == (
        "needs an SM90 GPU (H100, H200); this is sm_100"
    )
