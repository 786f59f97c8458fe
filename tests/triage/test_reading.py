"""What is read out of logs, commands, words and options, and how a row stands to it."""

from __future__ import annotations

import re
import time
import tomllib
from pathlib import Path

import pytest

from staleproof.triage import answer, facts, judge, read, table
from staleproof.triage.facts import Facts

LOGS = Path(__file__).with_name("logs")
EXPECTED = tomllib.loads((LOGS / "expected.toml").read_text())
NAN = "(APIServer pid=1) ValueError: Out of range float values are not JSON compliant: nan"


def of(*symptoms: str, **given: str) -> Facts:
    known = Facts(symptoms=[*symptoms])
    for name, word in given.items():
        known.learn(name, word, f"--{name}")
    known.derive()
    return known


def log(text: str) -> Facts:
    known = Facts()
    read.log(known, text)
    known.derive()
    return known


def words(text: str) -> Facts:
    known = Facts()
    read.words(known, text)
    known.derive()
    return known


def status(known: Facts, key: str) -> str:
    return next(one.status for one in judge.judge_all(known) if one.row.key == key)


@pytest.mark.parametrize("name", [*EXPECTED["ours"], *EXPECTED["others"]])
def test_a_log_leads_to_its_row_or_says_what_else_it_looks_like(name):
    known = log((LOGS / f"{name}.log").read_text())
    found = judge.judge_all(known)
    if name in EXPECTED["ours"]:
        assert found[0].row.key == EXPECTED["ours"][name]
        assert found[0].leads or not judge.looks_like(known, found)[0]
    else:
        assert answer.kind(known, found) == answer.NONE
        assert EXPECTED["others"][name] in judge.looks_like(known, found)[0]


def printed(line: str, word: str) -> str:
    """A line as vLLM prints it, with this value in it."""
    return line.replace("%s", word, 1).replace("%s", "x")


VALUES = {"moe_backend": "FLASHINFER_CUTLASS", "backend": "FLASH_ATTN", "prefill": "TRTLLM_RAGGED"}


@pytest.mark.parametrize("name", VALUES)
def test_every_line_in_which_a_release_names_a_backend_is_read(name):
    for line in table.engine()["lines"][name]:
        known = log(f"(Worker_TP0 pid=9) INFO 05-15 06:01:33 [a.py:1] {printed(line, VALUES[name])}").known
        assert known[name] == (VALUES[name].lower() if "%s" in line else known[name])
        assert re.fullmatch(r"\w+", known[name])
        others = {*VALUES} - {name}
        assert {*known} & others == set()


@pytest.mark.parametrize(
    ("line", "known"),
    [
        ("█ ▀▄▀ █  version 0.20.2", {"version": "0.20.2"}),
        ("Cudagraph is disabled under eager mode", {"graphs": "none"}),
        ("device: NVIDIA GeForce RTX 5090", {"gpu": "sm120"}),
        ("GPU 0: AMD Instinct MI300X", {"gpu": "rocm"}),
        ("Overriding cudagraph_mode from FULL_AND_PIECEWISE to PIECEWISE", {"graphs": "piecewise"}),
        ("Using V2 Model Runner", {"runner": "v2"}),
        (
            "Using 'MARLIN' NvFp4 MoE backend out of potential backends: x",
            {"moe_backend": "marlin", "quant": "nvfp4"},
        ),
        ("Using FLASH_ATTN MLA prefill backend.", {"prefill": "flash_attn"}),
        ("rank 0 is assigned as DP rank 0, EP rank 0", {}),
        ("not using flash_attn attention backend out of habit", {}),
        ("Up and running!!!!", {}),
    ],
)
def test_one_line_is_enough_for_its_facts_and_says_no_more(line, known):
    assert log(line).known == known


def test_skipping_lines_without_a_mark_loses_no_fact(monkeypatch):
    texts = [path.read_text() for path in LOGS.glob("*.log")]
    quick = [log(text) for text in texts]
    monkeypatch.setitem(table.terms("logs"), "marks", [""])
    assert [log(text) for text in texts] == quick


def test_a_day_of_lines_that_say_nothing_is_read_in_seconds():
    begin = time.process_time()
    known = log("hello world\n" * 400_000 + NAN)
    assert time.process_time() - begin < 2
    assert (known.symptoms, known.origin["nan"]) == (["nan"], "line 400001")


def test_the_first_line_that_says_what_went_wrong_decides():
    crash = "RuntimeError: CUDA error: an illegal memory access was encountered"
    late = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)"
    assert judge.looks_like(log(f"{crash}\n{late}")) == ("", "")
    assert judge.looks_like(log(f"{late}\n{crash}"))[0].startswith("a rank that hangs")


@pytest.mark.parametrize(
    ("version", "releases", "note"),
    [
        ("0.18.1+cu129", ("0.18.1",), ""),
        ("v0.18.1", ("0.18.1",), ""),
        ("v0.18", ("0.18.1",), "v0.18 is read as 0.18.1, the last release of its series"),
        ("0.29.1rc1.dev210+gb443c1c", ("0.29.0", "0.30.0"), "both 0.29.0 and 0.30.0"),
        ("0.18.1+mine", ("0.18.1",), "taken for 0.18.1"),
        ("0.15.1", (), "outside of 0.16.0 to 0.33.0"),
        ("0.34.0", (), "outside of 0.16.0 to 0.33.0"),
        ("main", (), "is not a release"),
    ],
)
def test_a_version_is_a_release_its_neighbours_or_a_note(version, releases, note):
    known = of("nan", version=version)
    assert known.releases == releases
    assert note in " ".join(known.notes)
    assert bool(known.notes) == bool(note)


def test_rows_of_an_unknown_release_are_weighed_without_it():
    assert status(of("oom", version="0.15.1", model="mla"), "decode_buffer") == judge.OPEN
    assert status(of("oom", version="0.20.2", model="mla"), "decode_buffer") == judge.AGAINST


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("deepseek-ai/DeepSeek-V3.1", "mla moe"),
        ("KimiLinearForCausalLM", "mla moe hybrid"),
        ("KimiK3ForConditionalGeneration", "mla moe hybrid"),
        ("Qwen3_5MoeForCausalLM", "moe hybrid"),
        ("Qwen/Qwen3-30B-A3B", "moe"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", ""),
        ("LlamaForCausalLM", ""),
        ("openai/gpt-oss-120b", "moe gpt-oss"),
        ("ibm-granite/granite-4.0-h-small", "hybrid"),
        ("Qwen2_5_VLForConditionalGeneration", ""),
        ("NobodysForCausalLM", ""),
    ],
)
def test_models_by_name_and_by_architecture(name, there):
    found = {trait for trait, has in facts.model(name).items() if has}
    assert found - ({"moe"} - {*there.split()} if "granite" in name else set()) == {*there.split()}
    assert bool(facts.model(name)) == (name != "NobodysForCausalLM")


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("nvidia/Kimi-K2.6-NVFP4", "nvfp4"),
        ("deepseek-ai/DeepSeek-R1", "fp8-block"),
        ("Qwen/Qwen3-30B-A3B-FP8", "fp8-block"),
        ("unsloth/gpt-oss-20b-BF16", "none"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "other"),
        ("Qwen/Qwen3-32B", None),
    ],
)
def test_a_quantisation_by_the_name_of_the_checkpoint(name, quant):
    assert of(model=name).known.get("quant") == quant


def test_fp8_alone_does_not_say_whose_scales_they_are():
    known = of("differs", model="moe", quant="fp8", version="0.26.0", graphs="full")
    assert status(known, "fp8_scale") == judge.OPEN
    # Nor does it replace what a checkpoint's name says.
    assert of(model="deepseek-r1", quant="fp8").known["quant"] == "fp8-block"


COMMAND = "vllm serve m/Qwen3-Next-80B"


@pytest.mark.parametrize(
    ("command", "known"),
    [
        (f"{COMMAND} --enforce-eager --max-model-len 8", "graphs=none -dp -spec hybrid"),
        (f"{COMMAND} -dp 4 --enable-expert-parallel", "dp ep graphs=full scheduling=async"),
        (f"{COMMAND} --data-parallel-size=1 --no-async-scheduling", "-dp scheduling=sync"),
        (f"{COMMAND} \\\n  --decode-context-parallel-size 2 \\\n  --enable-lora", "dcp lora"),
        (f'{COMMAND} --kv-transfer-config \'{{"kv_connector": "NixlConnector"}}\'', "kv-transfer"),
        (f"{COMMAND} --moe-backend flashinfer_cutlass --quantization fp8", "moe_backend=flashinfer_cutlass"),
        (f"{COMMAND} -cc.cudagraph_mode=PIECEWISE", "graphs=piecewise"),
        (
            "docker run -e VLLM_BATCH_INVARIANT=1 vllm/vllm-openai:v0.20.2 --model a/Jamba-1.5",
            "batch-invariant version=0.20.2",
        ),
        ("docker run vllm/vllm-openai-rocm:v0.25.1 --model a/Llama-3.1-8B", "gpu=rocm version=0.25.1"),
        ("pip install vllm==0.22.1 && vllm serve a/Llama-3.1-8B", "version=0.22.1 -moe"),
    ],
)
def test_a_command_line_says_what_it_has_and_that_the_rest_is_default(command, known):
    for text in (f"# started with\n{command}\nINFO ready", None):
        found = Facts()
        if text is None:
            read.command(found, command, "--command", whole=True)
        else:
            read.log(found, text)
        found.derive()
        said = {f"{name}={word}" for name, word in found.known.items()}
        said |= {trait if there else f"-{trait}" for trait, there in found.traits.items()}
        assert {*known.split()} <= said


def test_what_follows_a_command_in_a_sentence_is_not_of_it():
    known = words(
        "vllm serve Qwen/Qwen3.5-9B -tp 2 gives garbage on 0.22.1, and gone with --no-async-scheduling"
    )
    assert (known.symptoms, known.known["version"], known.helped) == (
        ["nan"],
        "0.22.1",
        ["no-async-scheduling"],
    )
    assert known.known["scheduling"] == "async"


def test_what_was_tried_is_no_fact_of_the_server():
    """The log of a run with the remedy in place shows it as if the server ran so."""
    log_of_cure = log("Cudagraph is disabled under eager mode\nResolved architecture: DeepseekV3ForCausalLM")
    assert log_of_cure.known["graphs"] == "none"
    log_of_cure.helped = ["enforce-eager"]
    log_of_cure.derive()
    assert log_of_cure.known["graphs"] == "full"


def test_a_remedy_that_did_not_help_speaks_against_the_row_that_it_cures():
    known = of("nan", version="0.20.2", model="mla", graphs="full", gpu="b200")
    assert status(known, "empty_rows") == judge.SO_FAR
    known.helped = ["enforce-eager"]
    assert status(known, "empty_rows") == judge.FITS
    known.helped, known.failed = [], ["enforce-eager"]
    assert status(known, "empty_rows") == judge.AGAINST
    # One that helped and that the row does not explain keeps it from leading.
    known.helped, known.failed = ["marlin"], []
    assert status(known, "empty_rows") == judge.MEASURED


@pytest.mark.parametrize("row", table.rows(), ids=lambda row: row.key)
def test_a_row_leads_only_if_all_is_known_and_each_need_can_refute_it(row):
    known = Facts(symptoms=[row.symptoms[0]], releases=(row.releases[0],), known={"version": row.releases[0]})
    for name, values in row.needs.items():
        if name in ("model", "setup"):
            here = [value.removeprefix("not ") for value in values[0].split("+")]
            known.traits.update(dict.fromkeys(here, not values[0].startswith("not ")))
        else:
            known.known[name] = values[0]
    # Where it was measured otherwise, by GPU or backend, the fact is asked for.
    known.known |= {name: "elsewhere" for name in row.weighs if name not in known.known}
    assert judge.judge(row, known).leads
    for name in (*row.needs, "version"):
        with_other = Facts(
            symptoms=known.symptoms, releases=known.releases, known={**known.known}, traits={**known.traits}
        )
        without = Facts(
            symptoms=known.symptoms, releases=known.releases, known={**known.known}, traits={**known.traits}
        )
        if name in ("model", "setup"):
            with_other.traits = {trait: not there for trait, there in known.traits.items()}
            without.traits = {}
        elif name == "version":
            with_other.releases = tuple(r for r in table.probes() if r not in row.releases)[:1] or ("0.0.1",)
            without.releases = ()
        else:
            with_other.known[name] = "other"
            del without.known[name]
        assert not judge.judge(row, with_other).alive, name
        assert not judge.judge(row, without).leads, name
    assert not judge.judge(row, Facts(releases=known.releases, known=known.known, traits=known.traits)).leads
    for name, values in row.excludes.items():
        assert not judge.judge(
            row, Facts(known.symptoms, {**known.known, name: values[0]}, known.traits)
        ).alive


def test_a_part_of_the_set_up_that_few_have_never_leads_while_it_is_unknown():
    known = of("nan", version="0.19.1", model="moe", gpu="h100", graphs="full")
    for key in ("dummy_slots", "nan_bias", "simulated_routing", "published_unwritten"):
        assert status(known, key) == judge.UNLESS
    known.learn("with", "nan-bias", "--with")
    assert status(known, "nan_bias") == judge.SO_FAR


def test_a_patch_that_is_in_place_speaks_against_and_two_are_needed_where_two_are():
    known = of("crash", version="0.18.1", model="moe", moe_backend="flashinfer_cutlass", graphs="full")
    known.in_place = ("topk_nan",)
    assert status(known, "repeated_experts") == judge.SO_FAR
    known.in_place = log(
        "staleproof on vLLM 0.18.1, this process: in place: topk_nan, duplicate_experts"
    ).in_place
    assert status(known, "repeated_experts") == judge.AGAINST


def test_a_log_of_the_watch_names_its_row_although_the_patch_is_in_place_at_last():
    stands = "staleproof on vLLM 0.32.0, this process: in place: unpublish, contain"
    off = "staleproof: unpublish: switched off by /run/off; out of service: unpublish; in service: contain"
    hit = "staleproof: first unwritten hit of the prefix cache: b reads block 1, published by a"
    lines = [stands, off, "staleproof: unpublish: in service again"]
    assert log("\n".join(lines[:2])).in_place == ("contain",)
    assert {*log("\n".join(lines)).in_place} == {"contain", "unpublish"}
    for text, wanted in (
        ("\n".join(lines), judge.AGAINST),
        ("\n".join([*lines[:2], hit, lines[2]]), judge.FITS),
    ):
        known = log(f"vLLM API server version 0.32.0\n{text}")
        known.add_symptom("nan", "--symptom")
        assert status(known, "published_unwritten") == wanted


def test_options_of_a_log_are_no_names_of_kernels_and_a_sentence_is_no_command():
    known = log(
        "Initializing a V1 LLM engine (v0.32.0) with config: disable_custom_all_reduce=False, "
        "'fuse_allreduce_rms': False\nEndpoints are disabled. Restart vllm serve with --enable-scale-out"
    )
    assert (known.others, known.notes) == ({}, [])


def test_a_progress_bar_is_one_line():
    assert log("0%\r50%\r100%\nvLLM API server version 0.32.0").origin["version"] == "line 2"


def test_what_was_measured_otherwise_never_leads_and_an_unknown_backend_or_gpu_is_asked_for():
    given = {"version": "0.22.1", "model": "deepseek-r1", "graphs": "full"}
    for backend in ("FLASH_ATTN_MLA", "FLASHMLA"):
        assert status(of("nan", backend=backend, **given), "empty_rows") == judge.MEASURED
    assert status(of("nan", gpu="h200", **given), "empty_rows") == judge.MEASURED
    known = of("nan", **given)
    assert judge.deciding(known, judge.judge_all(known))[0] == "gpu"


def test_a_patch_says_whether_it_touches_the_backend():
    row = table.of("mla_padding")[0]
    given = {"version": "0.22.1", "model": "mla"}
    assert answer.patch_lines(row, of(backend="TRITON_MLA", **given))[0][2] == "touches TRITON_MLA"
    assert answer.patch_lines(row, of(backend="FLASHMLA", **given))[0][2] == "does not touch FLASHMLA"
    assert "yours is unknown (--backend)" in answer.patch_lines(row, of(**given))[0][2]


def test_what_a_row_says_that_you_see_is_read_as_its_symptom():
    for row in table.rows():
        assert {*words(table.plain(row.see)).symptoms} & {*row.symptoms}, row.key


def test_a_word_that_is_not_known_is_a_note_and_no_error():
    known = of(
        "nan",
        gpu="voodoo2",
        graphs="maybe",
        quant="fp9",
        model="mine",
        parallel="many",
        backend="x",
        phase="y",
    )
    assert (known.known, known.traits) == ({}, {})
    assert len(known.notes) == 7
    assert all("answered without it" in note for note in known.notes)


@pytest.mark.parametrize(("width", "verbose"), [(60, True), (80, False)])
def test_lines_fit_the_terminal(width, verbose):
    for name in EXPECTED["ours"]:
        known = log((LOGS / f"{name}.log").read_text())
        for line in answer.as_text(known, judge.judge_all(known), width, verbose=verbose).splitlines():
            # Only a path or an option that is longer than the line stands alone on it.
            assert len(line) <= width or len(line.split()) == 1, line
