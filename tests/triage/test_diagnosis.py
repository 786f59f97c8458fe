"""Facts from options and logs, and how rows stand to them. Logs have the format of their release."""

from __future__ import annotations

import json
import re
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from staleproof.triage import answer, facts, judge, logs, table
from staleproof.triage.facts import Facts
from staleproof.triage.text import wrapped

LOGS = Path(__file__).with_name("logs")


def of(**given: str) -> Facts:
    known = Facts()
    for name, word in given.items():
        known.learn(name, word, f"--{name}")
    known.derive()
    return known


def standing(known: Facts) -> dict[str, str]:
    return {j.row.key: j.status for j in judge.judge_all(known) if j.alive}


def read(name: str) -> Facts:
    return logs.read((LOGS / f"{name}.log").read_text())


# Log -> every fact in it, and its model: mla, moe, hybrid.
FROM_LOGS: dict[str, tuple[dict[str, str], tuple[bool, ...]]] = {
    "vllm-0.16.0-hybrid-drift": (
        {"version": "0.16.0", "graphs": "full", "quant": "none", "backend": "flashinfer"}
        | {"moe_backend": "triton", "scheduling": "async", "parallel": "none"},
        (False, True, True),
    ),
    "vllm-0.18.1-oom-gb200": (
        {"version": "0.18.1", "symptom": "oom", "phase": "serving", "graphs": "full", "quant": "nvfp4"}
        | {"backend": "flashinfer_mla", "moe_backend": "flashinfer_trtllm", "gpu": "sm100"}
        | {"parallel": "dp+ep"},
        (True, True, False),
    ),
    "vllm-0.20.2-illegal-access": (
        {"version": "0.20.2", "symptom": "crash", "phase": "serving", "graphs": "piecewise", "quant": "none"}
        | {"backend": "flash_attn", "moe_backend": "flashinfer_cutlass", "scheduling": "async"}
        | {"parallel": "dp"},
        (False, True, False),
    ),
    "vllm-0.22.1-triton-mla-h200": (
        {"version": "0.22.1", "symptom": "nan", "phase": "serving", "graphs": "full", "quant": "fp8"}
        | {"backend": "triton_mla", "moe_backend": "triton", "gpu": "sm90", "scheduling": "async"}
        | {"parallel": "none"},
        (True, True, False),
    ),
    "vllm-0.33.0-oom-at-start": (
        {"version": "0.33.0", "symptom": "oom", "phase": "start", "graphs": "none", "quant": "none"}
        | {"backend": "flash_attn", "parallel": "none"},
        (False, False, False),
    ),
    "not-a-vllm": ({}, ()),
}


@pytest.mark.parametrize("name", FROM_LOGS)
def test_a_log_says_what_it_says_and_no_more(name):
    known, model = FROM_LOGS[name]
    assert (read(name).known, read(name).notes) == (known, [])
    assert read(name).traits == dict(zip(facts.TRAITS, model, strict=False))


EXPECTED = tomllib.loads((LOGS / "expected.toml").read_text())
ALL = sorted(path.stem for path in LOGS.glob("*.log") if path.stem != "not-a-vllm")


@pytest.mark.parametrize("name", ALL)
def test_a_log_leads_to_its_row_or_says_what_else_it_looks_like(name):
    known = read(name)
    found = judge.judge_all(known)
    if name in EXPECTED["ours"]:
        assert (found[0].row.key, found[0].alive) == (EXPECTED["ours"][name], True)
        assert known.looks_like == ""
        return
    # A log that is none of ours is neither ranked nor passed over in silence.
    assert [j.row.key for j in found if j.alive] == []
    says = EXPECTED["others"][name]
    assert says in known.looks_like
    for verbose in (False, True):
        text = " ".join(answer.as_text(known, found, verbose=verbose).split())
        # It comes with its line.
        like = f"nothing here fits; this looks like {known.looks_like} ({known.origin['symptom']})."
        assert (like if says else answer.NOTHING) in text
        assert text.endswith("-v says what speaks against each.") is not verbose
    assert json.loads(answer.as_json(known, found))["looks_like"] == (known.looks_like or None)


def test_the_first_line_that_says_what_went_wrong_decides():
    crash = "RuntimeError: CUDA error: an illegal memory access was encountered"
    late = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)"
    for line, symptom in ((late, facts.OTHER), ("CUDA out of memory. Tried to allocate", "oom")):
        assert logs.read(f"{crash}\n{line}").known["symptom"] == "crash"
        assert logs.read(f"{line}\n{crash}").known["symptom"] == symptom


# What went wrong -> how vLLM, torch, CUDA and our watch write it.
WRITTEN = {
    "crash": "an illegal memory access was, cudaErrorIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS",
    "oom": "CUDA out of memory, torch.OutOfMemoryError: 2 GiB, CUDA error: out of memory",
    "nan": "Corrupted: 12 reqs, NaNs found in the logits, first live row with NaN, NaN detected, !!!!!!!!, "
    "Out of range float values are not JSON compliant: nan",
}


@pytest.mark.parametrize("symptom", WRITTEN)
def test_what_went_wrong_is_known_however_it_is_written(symptom):
    known = {line: logs.read(f"ERROR 04-02 22:05:45 {line}").known for line in WRITTEN[symptom].split(", ")}
    assert known == {line: {"symptom": symptom} for line in known}


NAMED = "Initializing a V1 LLM engine (v0.20.2) with config: model='deepseek-ai/DeepSeek-V3', seed=0"
LLAMA = "Resolved architecture: LlamaForCausalLM"


def test_a_fact_says_its_line_and_the_last_line_holds():
    known = logs.read(
        "non-default args: {'compilation_config': {'cudagraph_mode': <CUDAGraphMode.FULL: 2>}}\n"
        "CUDAGraphMode.FULL is not supported with this backend; setting cudagraph_mode=PIECEWISE\n"
    )
    assert known.known == {"graphs": "piecewise"}
    assert known.origin["graphs"] == "line 2"


# A fact stands in several lines of a whole log, and one of them is enough.
ALONE = {
    "█ ▀▄▀ █  version 0.20.2": {"version": "0.20.2"},
    "staleproof on vLLM 0.20.2, this process: in place: mla_padding": {"version": "0.20.2"},
    "Cudagraph is disabled under eager mode": {"graphs": "none"},
    "device: NVIDIA GeForce RTX 5090": {"gpu": "sm120"},
    "device: NVIDIA_GeForce_RTX_4090": {"gpu": "sm89"},
    "Overriding cudagraph_mode from FULL_AND_PIECEWISE to PIECEWISE": {"graphs": "piecewise"},
    "Using 'MARLIN' NvFp4 MoE backend out of potential": {"moe_backend": "marlin", "quant": "nvfp4"},
}


@pytest.mark.parametrize("line", ALONE)
def test_one_line_is_enough_for_its_facts(line):
    assert logs.read(line).known == ALONE[line]


@pytest.mark.parametrize("name", FROM_LOGS)
def test_skipping_lines_without_a_mark_loses_no_fact(name, monkeypatch):
    quick = read(name)
    monkeypatch.setattr(logs, "MARKS", ("",))
    assert read(name) == quick


THROUGHPUT = (
    "INFO 04-02 22:05:45 [loggers.py:259] Engine 000: Avg prompt throughput: 210.3 tokens/s, Running: 3"
)


@pytest.mark.parametrize(("line", "times"), [(THROUGHPUT, 30_000), ("hello world", 400_000)])
def test_a_day_of_lines_that_say_nothing_is_read_in_seconds(line, times):
    text = (LOGS / "vllm-0.18.1-oom-gb200.log").read_text()
    begin = time.process_time()
    known = logs.read(f"{line}\n" * times + text)
    # Without the marks, or with a look at every line, it takes many times as long.
    assert time.process_time() - begin < 1
    assert known.known == FROM_LOGS["vllm-0.18.1-oom-gb200"][0]
    assert known.origin["symptom"] == f"line {times + 15}"


BEGUN = "Initializing a V1 LLM engine (v0.18.1) with config: seed=0"
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
# Where an error is from, by a line before it.
PHASES = {
    "start": (
        '  File "/opt/vllm/v1/worker/gpu_worker.py", line 340, in determine_available_memory',
        '  File "/opt/vllm/v1/worker/gpu_model_runner.py", line 4100, in load_model',
        "EngineCore failed to start.",
    ),
    "serving": (
        "Application startup complete.",
        "Graph capturing finished in 24 secs, took 3.10 GiB",
        'INFO: 10.0.0.1:5 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
        "Dumping input data for V1 LLM engine (v0.18.1) with config: seed=0",
        '  File "/opt/vllm/v1/worker/gpu_model_runner.py", line 3300, in execute_model',
    ),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_log_says_whether_the_server_started(phase):
    for line in PHASES[phase]:
        known = logs.read(f"{BEGUN}\n{line}\n{OUT_OF_MEMORY}")
        assert known.known["phase"] == phase, line
        assert known.looks_like == (logs.TOO_LARGE if phase == "start" else "")


def test_a_log_in_which_nothing_says_when_does_not_say_when():
    """People paste head and tail."""
    for text in (OUT_OF_MEMORY, f"{BEGUN}\n{OUT_OF_MEMORY}"):
        assert "phase" not in logs.read(text).known
        assert logs.read(text).looks_like == ""


def test_an_engine_that_failed_to_start_did_not_serve():
    """Though it had its cache already."""
    ready = "init engine (profile, create kv cache, warmup model) took 9.31 seconds"
    for line in ("CUDA out of memory. Tried to allocate 2.00 GiB", "an illegal memory access"):
        assert logs.read(f"{ready}\n{line}").known["phase"] == "serving"
        assert logs.read(f"{ready}\n{line}\nEngineCore failed to start.").known["phase"] == "start"
        # A restart is another story.
        assert logs.read(f"{ready}\n{line}\n{PHASES['start'][0]}").known["phase"] == "serving"


@pytest.mark.parametrize(
    "line",
    [
        "Running: 3 reqs, Waiting: 0 reqs, Corrupted: 0 reqs",
        # As every server says of its first rank, with expert parallelism or without.
        "rank 0 in world size 1 is assigned as DP rank 0, PP rank 0, TP rank 0, EP rank 0",
        "Up and running!!!!",
    ],
)
def test_a_line_of_a_sound_server_says_nothing_is_wrong_and_nothing_of_it(line):
    assert logs.read(line).known == {}


def test_what_a_log_says_in_unknown_words_stays_unknown_with_a_note():
    known = logs.read(
        "Initializing a V1 LLM engine (v0.18.1.dev7+gabc) with config: quantization=fp9, seed=0"
    )
    assert known.known == {}
    assert [note.partition(": ")[0] for note in known.notes] == ["line 1", "line 1"]
    assert "development build" in known.notes[0]


def test_a_format_that_may_hold_fp8_or_fp4_is_a_note_and_no_guess():
    for word in ("compressed-tensors", "quark", "torchao"):
        known = of(symptom="nan", quant=word)
        assert known.known == {"symptom": "nan"}
        assert known.notes == [f"--quant: {word} holds fp8, fp4 or another; say which"]
    # It replaces no other fact.
    known = of(quant="nvfp4")
    known.learn("quant", "compressed-tensors", "line 1")
    assert known.known == {"quant": "nvfp4"}


def test_another_quantisation_rules_out_what_needs_fp8_or_fp4():
    rows = {j.row.key for j in judge.judge_all(of(quant="awq")) if j.against}
    assert {"fp8_scale", "scale_padding", "scale_tail"} == rows


def test_a_model_that_we_do_not_know_is_a_note_and_no_guess():
    known = logs.read("Resolved architecture: NobodysForCausalLM")
    assert known.traits == known.origin == {}
    assert known.notes == [
        "line 1: NobodysForCausalLM is no model that we know; say mla, moe, hybrid or dense"
    ]


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("deepseek-ai/DeepSeek-V3.1", {"mla", "moe"}),
        ("moonshotai/Kimi-K2-Instruct", {"mla", "moe"}),
        ("KimiLinearForCausalLM", {"mla", "moe", "hybrid"}),
        ("Qwen3_5MoeForCausalLM", {"moe", "hybrid"}),
        ("Qwen/Qwen3-30B-A3B", {"moe"}),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", set()),
        ("DeepseekV4ForCausalLM", {"moe"}),
        ("NemotronHForCausalLM", {"hybrid"}),
        ("LlamaForCausalLM", set()),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", {"moe"}),
        ("Qwen 3 Coder Next", {"moe", "hybrid"}),
        ("MistralLarge3ForCausalLM", {"mla", "moe"}),
        ("deepseek-ai/DeepSeek-Coder-V2-Instruct", {"mla", "moe"}),
    ],
)
def test_models_by_name(name, there):
    assert {trait for trait, has in facts.traits(name).items() if has} == there


DENSE = (
    *("meta-llama/Llama-3.1-70B-Instruct", "Qwen/Qwen3-32B", "Qwen2.5-Coder-7B", "Qwen3ForCausalLM"),
    *("deepseek-coder-33b-instruct", "mistralai/Mistral-7B-v0.3", "MistralForCausalLM", "google/gemma-3-27b"),
)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Qwen/Qwen3.5-27B", {"hybrid": True}),
        ("LFM2ForCausalLM", {"hybrid": True}),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", {}),
        ("meta-llama/Llama", {"mla": False, "moe": False, "hybrid": False}),
        ("Phi3ForCausalLM", {"mla": False, "moe": False, "hybrid": False}),
        ("DeepseekV4ForCausalLM", {"moe": True}),
        ("google/gemma-4-26B-A4B-it", {"moe": True}),
        ("Gemma4ForCausalLM", {}),
        *((name, {}) for name in ("qwen", "Qwen3", "mistral", "gemma", "deepseek-coder", "deepseek-llm-67b")),
        *((name, dict.fromkeys(facts.TRAITS, False)) for name in DENSE),
    ],
)
def test_of_a_family_with_several_kinds_of_models_no_more_is_known_than_all_have(name, known):
    assert facts.traits(name) == known


@pytest.mark.parametrize(
    ("line", "traits", "origin"),
    [
        (
            "Setting attention block size so that it is no smaller than mamba page size.",
            {"hybrid": True},
            "line 1",
        ),
        ("Using FLASH_ATTN attention backend out of x\nUsing Triton GDN kernels", {"hybrid": True}, "line 2"),
        ("GatedDeltaNetAttention", {"hybrid": True}, "line 1"),
        (f"{LLAMA}\nMambaSpec", {"mla": False, "moe": False, "hybrid": True}, "line 1"),
        # The architecture says more than a name, whichever comes first; and colours hide no line.
        (f"{LLAMA}\n{NAMED}", {"mla": False, "moe": False, "hybrid": False}, "line 1"),
        (f"{NAMED}\n{LLAMA}", {"mla": False, "moe": False, "hybrid": False}, "line 2"),
        (
            "\x1b[32mINFO\x1b[0m Resolved architecture: \x1b[1mDeepseekV3ForCausalLM\x1b[0m",
            {"mla": True, "moe": True, "hybrid": False},
            "line 1",
        ),
        ("Starting to load model mine", {}, None),
        ("Starting to load model Llama...", {"mla": False, "moe": False, "hybrid": False}, "line 1"),
        ("Starting to load model a/Qwen3-30B-A3B...", {"mla": False, "moe": True, "hybrid": False}, "line 1"),
        ("non-default args: {'model_tag': 'a/Jamba', 'x': 1}", {"hybrid": True}, "line 1"),
    ],
)
def test_a_line_that_names_the_model_or_its_kernels(line, traits, origin):
    known = logs.read(line)
    assert (known.traits, known.origin.get("model")) == (traits, origin)


@pytest.mark.parametrize(
    ("lines", "word", "origin"),
    [
        (["data_parallel_size=1,"], "none", "data_parallel_size=1 in the log"),
        (["data_parallel_size=2,"], "dp", "line 1"),
        (["", "data_parallel_size=4,", "EP rank 1/4"], "dp+ep", "line 3"),
        (["data_parallel_size=1, enable_expert_parallel=True"], "ep", "line 1"),
        (["data_parallel_size=8", "data_parallel_size=1"], "none", "data_parallel_size=1 in the log"),
    ],
)
def test_a_log_says_how_it_is_parallel(lines, word, origin):
    known = logs.read("\n".join(lines))
    assert (known.known, known.origin) == ({"parallel": word}, {"parallel": origin})


def test_a_prefill_backend_is_not_the_decode_backend():
    assert "backend" not in logs.read("Using FLASH_ATTN MLA prefill backend.").known
    # Nor is what somebody else writes in lower case.
    assert logs.read("not using flash_attn attention backend out of habit").known == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"symptom": "slow"}, "symptom: expected one of nan .* got 'slow'"),
        ({"symptom": "no NaN, but slow"}, "symptom: expected one of nan .* got 'no NaN, but slow'"),
        ({"symptom": "a nanosecond late"}, "symptom: expected one of nan .* got 'a nanosecond late'"),
        (
            {"version": "0.18.7"},
            r"version: vLLM 0.18.7 is not a release we know \(nearest: 0.18.1, 0.19.0\)$",
        ),
        ({"gpu": "voodoo2"}, "gpu: expected one of A100, .* got 'voodoo2'"),
        ({"graphs": "maybe"}, "graphs: expected one of none, piecewise, full, got 'maybe'"),
        ({"graphs": "not sure"}, "graphs: expected one of none, piecewise, full, got 'not sure'"),
        ({"parallel": "pp"}, r"parallel: expected dp, ep, dp\+ep or none, got 'pp'"),
        (
            {"backend": "triton"},
            "backend: expected a name as vLLM prints it, with one of mla, .* got 'triton'",
        ),
        ({"moe_backend": "mla"}, "moe_backend: expected a name as vLLM prints it, .* got 'mla'"),
        ({"model": ""}, "model: expected a model's name, or some of mla, moe, hybrid, dense, got ''"),
    ],
)
def test_bad_input_names_the_option(given, message):
    with pytest.raises(ValueError, match=message):
        of(**given)


def test_the_three_journeys():
    """Garbage on GB200, OOM after the upgrade, illegal access in fused MoE: the right row is first."""
    first = next(iter(standing(of(symptom="garbage", gpu="GB200", model="DeepSeek-R1", graphs="full"))))
    assert first == "empty_rows"
    # Of logs the first row is that of expected.toml.
    assert standing(read("oom-cut-before-start")) == {"decode_buffer": judge.FITS}
    assert standing(read("vllm-0.18.1-oom-gb200"))["decode_buffer"] == judge.FITS
    found = judge.judge_all(read("vllm-0.20.2-illegal-access"))[0]
    assert (found.status, found.signs) == (judge.FITS, ["the log names finalizeMoeRouting"])


@pytest.mark.parametrize(
    ("values", "met"),
    [
        ("mla, not moe", True),
        ("mla+moe, moe+hybrid, moe, not mla", False),
        ("mla+hybrid, hybrid, not hybrid", None),
    ],
)
def test_one_trait_that_is_missing_refutes_whatever_is_not_known(values, met):
    known = Facts(traits={"mla": True, "moe": False})
    for value in values.split(", "):
        assert known.meets("model", (value,)) is met
        assert known.meets("model", (value, "mla")) is True


@pytest.mark.parametrize("row", table.rows(), ids=lambda row: row.key)
def test_a_row_fits_its_own_words_and_each_need_can_refute_it(row):
    """Every need of a row matters: with another value, something speaks against it."""
    known = Facts()
    known.learn("symptom", row.symptoms[0], "test")
    known.learn("version", row.releases[0], "test")
    for name, values in row.needs.items():
        if name == "model":
            here = [value.removeprefix("not ") for value in values[0].split("+")]
            known.traits.update(dict.fromkeys(here, not values[0].startswith("not ")))
        else:
            known.known[name] = values[0]
    found = judge.judge(row, known)
    assert (found.unknown, found.against) == ([], [])
    assert found.status == (judge.ONLY_IF if row.also else judge.FITS)
    for name in row.needs:
        other = Facts({**known.known, **({} if name == "model" else {name: "other"})}, dict(known.traits))
        if name == "model":
            other.traits = {trait: not there for trait, there in known.traits.items()}
        assert not judge.judge(row, other).alive, name
    for name in ("symptom", "version"):
        without = Facts({k: v for k, v in known.known.items() if k != name}, dict(known.traits))
        assert judge.judge(row, without).unknown == [name]


def test_what_was_measured_otherwise_is_never_said_to_fit():
    known = read("vllm-0.22.1-triton-mla-h200")
    assert standing(known)["empty_rows"] == judge.MEASURED
    for verbose in (True, False):
        text = answer.as_text(known, judge.judge_all(known), verbose=verbose)
        assert re.search(r"but       .*on an H200 the NaN stayed in padding rows", text)
    # Nor where more must be true.
    row = next(row for row in table.rows() if row.key == "empty_rows")
    assert judge.judge(replace(row, also="a full moon"), known).status == judge.MEASURED


def test_what_was_measured_otherwise_comes_after_what_nothing_speaks_against():
    here = of(symptom="drift", backend="FLASH_ATTN")
    assert [*standing(here).items()][-1] == ("reused_blocks", judge.MEASURED)
    # A row of which all is known says more than one of which something is not.
    here = of(symptom="nan", version="0.22.1", model="mla", graphs="full", gpu="h200")
    assert [*standing(here).values()][:2] == [judge.MEASURED, judge.SO_FAR]


def test_where_it_was_reported_says_more_than_the_kind_of_model():
    given = {"symptom": "nan", "version": "0.18.1", "model": "Kimi-Linear", "graphs": "full"}
    known = of(**given, scheduling="async", gpu="b200")
    assert [*standing(known).items()][:2] == [("empty_rows", judge.FITS), ("staging_race", judge.FITS)]


def test_an_old_triton_mla_has_no_full_graphs():
    known = of(symptom="nan", version="0.20.2", backend="TRITON_MLA", graphs="full")
    assert known.known["graphs"] == "piecewise"
    assert "empty_rows" not in standing(known)
    assert "empty_rows" in standing(of(symptom="nan", version="0.22.0", backend="TRITON_MLA", graphs="full"))


def test_what_a_backend_says_of_the_model_holds_where_nobody_said_otherwise():
    known = of(backend="FLASHINFER_MLA")
    assert (known.traits, known.origin["model"]) == ({"mla": True}, "--backend")
    assert of(model="dense", backend="FLASHINFER_MLA").traits["mla"] is False
    assert of(model="hybrid", backend="FLASHINFER_MLA").origin["model"] == "--model"
    assert of(backend="FLASH_ATTN").traits == {}


def test_what_is_said_of_a_model_later_leaves_what_it_does_not_speak_of():
    known = of(model="Kimi-K2")
    known.learn("model", "hybrid", "you")
    assert (known.traits, known.origin["model"]) == ({"mla": True, "moe": True, "hybrid": True}, "you")


def test_whether_a_patch_is_needed_depends_on_the_release_if_nobody_said_which():
    known = of(symptom="oom")
    text = answer.as_text(known, judge.judge_all(known), verbose=True)
    assert "   patch     decode_buffer: depends on the release (give --version)\n" in text


def test_text_for_no_terminal_is_one_line():
    assert wrapped("a b " * 50, None, "x  ", "   ") == ["x  " + "a b " * 50]
    assert wrapped("", 9, "x  ") == ["x  "]


def test_a_patch_that_is_in_place_speaks_against():
    known = of(symptom="leak", version="0.22.1", model="dense")
    assert standing(known) == {"undrained_ids": judge.FITS}
    known.in_place = logs.read("staleproof on vLLM 0.22.1, this process: in place: undrained_ids").in_place
    assert standing(known) == {}


def test_a_row_of_two_patches_stands_while_one_of_them_is_missing():
    known = of(
        symptom="crash", version="0.18.1", model="moe", moe_backend="flashinfer_cutlass", graphs="full"
    )
    known.in_place = ("topk_nan",)
    assert standing(known)["repeated_experts"] == judge.FITS
    line = "staleproof on vLLM 0.18.1, this process: in place: topk_nan, duplicate_experts"
    known.in_place = logs.read(line).in_place
    assert "repeated_experts" not in standing(known)
    # This release needs one of two.
    known = of(symptom="drift", version="0.20.2", model="Kimi-Linear")
    known.in_place = ("mla_recording",)
    assert "mla_blocks" not in standing(known)


# Fact -> its word -> how people, vLLM and drivers write it; with commas between them.
SPELLED = {
    "symptom": {
        "nan": "garbage, gibberish, NaN, !!!!, nans in logits, wrong answers, corrupted output"
        ", runs to the token limit, data leak, leaks data across users, prompts leak between users"
        ", the answers contain text of another user's request, an answer from another user",
        "oom": "OOM after upgrade, OOMs, out-of-memory, torch.OutOfMemoryError",
        "crash": "illegal memory access, server crashes, cudaErrorIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS",
        "drift": "accuracy drops with uptime",
        "leak": "oom killer, leaking, OOM killed by kernel after 3 days, OOMKilled, killed by the kernel",
        "differs": "different logprobs, not reproducible",
    },
    "graphs": {
        "none": "none, eager, off, no, CUDAGraphMode.NONE",
        "piecewise": "piecewise, PIECEWISE, CUDAGraphMode.PIECEWISE",
        "full": "full, FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE",
    },
    "quant": {
        "mxfp4": "mxfp4, gpt_oss_mxfp4",
        "nvfp4": "NVFP4, modelopt_fp4, petit_nvfp4, fp4",
        "fp8": "FP8, modelopt, fbgemm_fp8",
        "other": "other, AWQ, gptq_marlin, GGUF, bitsandbytes, int8",
        "none": "none, bf16, fp16, no",
    },
    "parallel": {"none": "none, no, TP", "dp": "DP", "ep": "ep", "dp+ep": "DEP, dp+ep, EP DP"},
    "scheduling": {"async": "async, yes, enabled", "sync": "sync, no, disabled"},
    "phase": {"start": "start, startup, at start", "serving": "serving, load, under load"},
    "gpu": {
        "sm80": "A100, NVIDIA A100-SXM4-80GB, A800, sm_80",
        "sm89": "L4, NVIDIA L40S, L40S, RTX 4090",
        "sm90": "H100, NVIDIA_H200, H20, H800, GH200, sm90a",
        "sm100": "B200, NVIDIA GB200, B300, GB300, sm_100f, sm_103, sm103a",
        "sm120": "NVIDIA GeForce RTX 5090, NVIDIA RTX PRO 6000, sm_120",
    },
    "backend": {"flashinfer_mla": "FLASHINFER_MLA, FlashInfer MLA", "turboquant": "TurboQuant"},
    "moe_backend": {"flashinfer_cutlass": "FlashInfer CUTLASS", "deepgemm": "DeepGEMM"},
    "version": {"0.18.1": "v0.18.1, 0.18"},
}


@pytest.mark.parametrize("name", SPELLED)
def test_a_fact_is_known_however_it_is_spelled(name):
    spelled = {one: word for word, given in SPELLED[name].items() for one in given.split(", ")}
    assert {one: facts.READ[name](one) for one in spelled} == spelled


SENTENCES = {
    "NaN from Qwen3 Next": ({"symptom": "nan"}, {"moe", "hybrid"}),
    "NaN, Qwen3 30B A3B": ({"symptom": "nan"}, {"moe"}),
    "drift with Qwen 3 Next on 0.17": ({"symptom": "drift", "version": "0.17.1"}, {"moe", "hybrid"}),
    "NaN, Qwen 3 235B A22B": ({"symptom": "nan"}, {"moe"}),
    "NaN, Qwen3 Coder 480B": ({"symptom": "nan"}, {"moe"}),
    "NaN, Qwen 3.5 397B": ({"symptom": "nan"}, {"hybrid"}),
    "NaN, gemma 4 26b a4b": ({"symptom": "nan"}, {"moe"}),
    "NaN, Mistral Large 3": ({"symptom": "nan"}, {"mla", "moe"}),
    "NaN from deepseek-coder-33b": ({"symptom": "nan"}, set()),
    "NaN from DeepSeek-Coder-V2": ({"symptom": "nan"}, {"mla", "moe"}),
    "NaN from Llama 405B": ({"symptom": "nan"}, set()),
    "NaN from Llama 4-bit": ({"symptom": "nan"}, set()),
    "NaN from Llama 4 Maverick": ({"symptom": "nan"}, {"moe"}),
    "NaN from DeepSeek-V4": ({"symptom": "nan"}, {"moe"}),
    "NaN from DeepSeek with CUDA graphs on 0.20": (
        {"symptom": "nan", "version": "0.20.2", "graphs": "full"},
        {"mla", "moe"},
    ),
    # What is said of the model is more than what its name says.
    "NaN from a Llama with MoE layers": ({"symptom": "nan"}, {"moe"}),
    "!!!! on GB200, NVFP4, dp": (
        {"symptom": "nan", "gpu": "sm100", "quant": "nvfp4", "parallel": "dp"},
        set(),
    ),
    "OOM after upgrade to v0.18.1, Kimi-K2, eager": (
        {"symptom": "oom", "version": "0.18.1", "graphs": "none"},
        {"mla", "moe"},
    ),
    "crash in flashinfer_cutlass, Qwen3-Next, 0.21, no async scheduling": (
        {"symptom": "crash", "version": "0.21.0", "moe_backend": "flashinfer_cutlass", "scheduling": "sync"},
        {"moe", "hybrid"},
    ),
    # A model, a library and CUDA have numbers of their own; of two releases the one that was reached counts.
    "NaN, DeepSeek-V3.1 with FlashInfer 0.6.18 and CUDA 12.8, upgraded vllm-0.17.1 to 0.18.1": (
        {"symptom": "nan", "version": "0.18.1"},
        {"mla", "moe"},
    ),
    "OOM on Llama-3.1, torch 2.11.0, 0.20 GiB free": ({"symptom": "oom"}, set()),
    "NaN with CUTLASS MLA": ({"symptom": "nan", "backend": "cutlass_mla"}, {"mla"}),
    "NaN on 0.22.1 beside FlashInfer 0.6.18": ({"symptom": "nan", "version": "0.22.1"}, set()),
    "crash with FlashInfer CUTLASS MoE, vllm==0.20.2, EP and data parallel, no eager": (
        {"symptom": "crash", "version": "0.20.2", "moe_backend": "flashinfer_cutlass", "parallel": "dp+ep"},
        {"moe"},
    ),
    # Only a name of vLLM's before MLA is a backend.
    "OOM on 0.19 with an MLA model on GB200": (
        {"symptom": "oom", "version": "0.19.1", "gpu": "sm100"},
        {"mla"},
    ),
    "OOM from a model with MLA, FlashInfer MLA": ({"symptom": "oom", "backend": "flashinfer_mla"}, {"mla"}),
    "NaN, flash attention": ({"symptom": "nan", "backend": "flash_attn"}, set()),
    # What is denied is no fact.
    "fine on H100, NaN on B200": ({"symptom": "nan", "gpu": "sm100"}, set()),
    "NaN with full CUDA graphs on 0.18.1, worked on 0.17.1 and with eager": (
        {"symptom": "nan", "version": "0.18.1", "graphs": "full"},
        set(),
    ),
    "stopped working on B200, NaN; it does not work in eager either": (
        {"symptom": "nan", "gpu": "sm100", "graphs": "none"},
        set(),
    ),
    "NaN not on H100 and H200, on B200": ({"symptom": "nan", "gpu": "sm100"}, set()),
    "no NaN, but OOM not on H100 or H200 but on B200": ({"symptom": "oom", "gpu": "sm100"}, set()),
    "NaN, doesn't happen with eager; dp, isn\N{RIGHT SINGLE QUOTATION MARK}t EP, not async": (
        {"symptom": "nan", "parallel": "dp", "scheduling": "sync"},
        set(),
    ),
    "NaN, we don't run dp, do not use expert parallel, data parallel is not used, fp8 isn't enabled": (
        {"symptom": "nan"},
        set(),
    ),
    "NaN, we have not used dp and cannot use eager, full graphs": (
        {"symptom": "nan", "graphs": "full"},
        set(),
    ),
    "NaN, the server does not run on B200": ({"symptom": "nan", "gpu": "sm100"}, set()),
    # A number is a release where it is the number of one, and no value.
    "OOM with --gpu-memory-utilization 0.95": ({"symptom": "oom"}, set()),
    "OOM with --swap-space 0.20, gpu_memory_utilization of 0.20, X_FRACTION=0.20, temperature 0.7": (
        {"symptom": "oom"},
        set(),
    ),
    "NaN, xformers 0.0.32, LMCache 0.3.9, slow, in 0.95 too": ({"symptom": "nan"}, set()),
    "NaN, vLLM 1.5 times as slow": ({"symptom": "nan"}, set()),
    "accuracy 0.85 drops from 0.31 to 0.25": ({"symptom": "drift"}, set()),
    "accuracy drops from 0.18.1 on": ({"symptom": "drift", "version": "0.18.1"}, set()),
    "NaN after 0.5 h with top_p of 0.25, not on 0.19, on 0.20": (
        {"symptom": "nan", "version": "0.20.2"},
        set(),
    ),
    "accuracy drops with uptime, Kimi Linear on H200 with TRITON_MLA": (
        {"symptom": "drift", "gpu": "sm90", "backend": "triton_mla"},
        {"mla", "moe", "hybrid"},
    ),
}


# The same of what is said beside a symptom.
BESIDE = {
    "gpu": {
        "sm100": "B200, on Blackwell",
        "sm90": "sm_90, on Hopper, 8xH200, 8 x H100",
        "sm120": "RTX 5090, GeForce RTX_5090, RTX PRO 6000",
    },
    "graphs": {
        "none": "--enforce-eager, enforce_eager=True, eager, no graphs, without CUDA graphs, graphs off, "
        "CUDA graphs disabled, graphs are off, disabled CUDA graphs, "
        "without any CUDA graphs, without the graphs, no full CUDA graphs, we do not use CUDA graphs, "
        "CUDA graphs are not used, CUDA graphs aren't enabled, not using any CUDA graphs",
        "piecewise": "piecewise CUDA graphs",
        "full": "full graphs, enforce_eager=False and CUDA graphs",
    },
    "quant": {
        "mxfp4": "MXFP4",
        "nvfp4": "FP4, NVFP4",
        "fp8": "FP8",
        "none": "BF16, fp16",
        "other": "AWQ, GPTQ",
    },
    "parallel": {"dp": "DP, data parallel", "ep": "EP, expert-parallel", "dp+ep": "DEP, dp+ep"},
    "scheduling": {
        "async": "async scheduling",
        "sync": "sync scheduling, no async scheduling, without async scheduling, async scheduling off, "
        "async scheduling is disabled, disabled async scheduling, we don't use async scheduling",
    },
    "phase": {"start": "at startup, on start", "serving": "under load, serving"},
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_fact_is_read_out_of_a_sentence_however_it_is_said(name):
    said = {one: word for word, given in BESIDE[name].items() for one in given.split(", ")}
    known = {one: facts.from_words(f"NaN {one}").known for one in said}
    assert known == {one: {"symptom": "nan", name: word} for one, word in said.items()}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_sentence_says_what_it_names(sentence):
    known, there = SENTENCES[sentence]
    found = facts.from_words(sentence)
    assert found.known == known
    assert {trait for trait, has in found.traits.items() if has} == there


def test_a_kind_of_model_that_is_denied_is_known_not_to_be():
    for sentence, moe in (
        ("OOM, a MoE without MLA", {"moe": True}),
        ("OOM without MLA", {}),
        ("OOM, it does not use MLA", {}),
    ):
        known = facts.from_words(sentence)
        assert (known.traits, known.origin["model"]) == (moe | {"mla": False}, "your words")


def test_a_name_of_which_nothing_is_known_is_no_other_model():
    for name in ("DeepSeek R1 distill Llama 70B", "DeepSeek Coder", "Gemma 4 31B", "Qwen3 on 8 GPUs"):
        assert facts.from_words(f"NaN from {name}").traits == {}


def test_another_server_gets_a_note():
    known = facts.from_words("NaN with SGLang 0.18")
    assert (known.known, known.notes) == ({"symptom": "nan"}, [facts.OF_VLLM])
    for words in ("NaN in vLLM, where SGLang gives none", "NaN, fine with SGLang", "NaN, not with sglang"):
        assert facts.from_words(words).notes == []


@pytest.mark.parametrize("version", ["vLLM 1.0", "vLLM 0.95", "v0.95", "on 0.95", "to 0.95", "0.95.1"])
def test_a_number_that_is_said_to_be_a_release_must_be_one(version):
    with pytest.raises(ValueError, match=r"version: vLLM (0\.95(\.1)?|1\.0) is not a release we know"):
        facts.from_words(f"NaN {version}")


@pytest.mark.parametrize("row", table.rows(), ids=lambda row: row.key)
def test_what_a_row_says_that_you_see_is_read_and_does_not_rule_it_out(row):
    for text in (row.see, f"{row.see}. vLLM {row.affected}."):
        known = facts.from_words(table.plain(text))
        known.derive()
        assert judge.judge(row, known).against == []


def test_nothing_is_more_certain_than_its_evidence():
    """No text says that it is the incident."""
    for name in FROM_LOGS:
        known = read(name)
        text = answer.as_text(known, judge.judge_all(known), verbose=True)
        assert not re.search(r"\b(certain|proved|is caused by|root cause is)\b", text)


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("name", FROM_LOGS)
def test_lines_fit_the_terminal(name, width, verbose):
    known = read(name)
    lines = answer.as_text(known, judge.judge_all(known), width, verbose=verbose).splitlines()
    for line in lines:
        # Only a path or an option that is longer than the line stands alone on it.
        assert len(line) <= width or len(line.split()) == 1, line


def test_of_rows_of_which_as_much_is_known_the_one_with_better_evidence_comes_first():
    first = [j.row for j in judge.judge_all(of(symptom="NaN"))][:2]
    assert [(row.key, row.grade) for row in first] == [("empty_rows", "real"), ("staging_race", "real")]
    assert "dummy_slots" in standing(of(symptom="NaN"))


def test_questions_end_where_no_answer_would_change_anything():
    known = of(symptom="leak", version="0.22.1")
    assert judge.next_question(known, []) == "model"
    known.learn("model", "Llama", "you")
    assert judge.next_question(known, ["symptom", "version", "model"]) is None
