"""Our attention backend in the classes of three released vLLMs, on a CPU. Speed and graphs need a GPU."""

import environment
import pytest
import warm

SCRIPT = environment.HERE / "real_mla_backend.py"


@pytest.mark.parametrize("version", ["0.22.1", "0.26.0", "0.33.0"])
def test_backend_binds_to_released_classes_and_refuses_by_name(version):
    answers = warm.answer(warm.released(version, str(SCRIPT)))
    assert answers["version"] == version
    assert answers["abstract"] == answers["accepted"] == answers["fp8"] == []
    assert answers["graphs"] == "UNIFORM_BATCH"
    assert max(answers["errors"]) < 1e-4
    assert all(answers["refused"].values()), answers["refused"]
    for name in ("SM80", "head size"):
        assert any("use TRITON_MLA" in reason for reason in answers["refused"][name])
