"""Patches of an installed vLLM, one module an incident."""

from __future__ import annotations

# Incident -> the notebook that walks through it. The patches of an incident are in the module of its name.
NOTEBOOKS = {
    "mla_padding": "01_mla_padding.ipynb",
    "decode_buffer": "02_decode_buffer_oom.ipynb",
    "moe_routing": "03_moe_routing.ipynb",
    "kv_reuse": "04_kv_reuse.ipynb",
    "scale_padding": "05_the_revert.ipynb",
    "mxfp4_scales": "07_the_scale_behind_the_last.ipynb",
    "published_unwritten": "08_published_before_written.ipynb",
    "uniform_decode": "09_a_prompt_as_long_as_a_draft.ipynb",
}
