"""Says which compiled module each of FlashInfer's audit subjects asks for, without a GPU.

Each adapter is called with CPU tensors that say they are on a GPU, and compiling is switched off:
FlashInfer's own code then stops where it would load the module. For a process of its own, because parts of
torch are replaced.

    python tests/kernels/flashinfer_modules.py            the installed release
    python tests/kernels/flashinfer_modules.py FOLDER     one that is unpacked in a folder

It prints JSON: subject -> what the audit says of its clause 0, and what the kernels of incident 4 say.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Callable
from typing import Any

ARCHITECTURE = {"FLASHINFER_DISABLE_JIT": "1", "FLASHINFER_CUDA_ARCH_LIST": "9.0a"}


def _on_cpu(value: Any) -> Any:
    return "cpu" if str(value).startswith("cuda") else value


def pretended_hopper() -> Any:
    """A mode in which CPU tensors say they are on an SM90 GPU, and new ones are made on the CPU."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Hopper(TorchFunctionMode):
        def __torch_function__(
            self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func == torch.Tensor.device.__get__:
                return torch.device("cuda", 0)
            if func == torch.Tensor.is_cuda.__get__:
                return True
            kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
            # There is no memory to pin.
            kwargs.pop("pin_memory", None)
            args = [_on_cpu(x) if isinstance(x, str | torch.device) else x for x in args]
            return func(*args, **kwargs)

    properties = {"major": 9, "minor": 0, "multi_processor_count": 132}
    torch.version.cuda = torch.version.cuda or "13.0"
    torch.cuda.get_device_capability = lambda *args: (9, 0)
    torch.cuda.get_device_properties = lambda *args: types.SimpleNamespace(**properties)
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = lambda device: contextlib.nullcontext()
    return Hopper()


def main() -> None:
    """The command; see the module."""
    sys.path[:0] = sys.argv[1:]
    from staleproof.contract import runner
    from staleproof.incidents.kv_reuse import attention
    from staleproof.kernels import flashinfer
    from staleproof.kernels.subject import subjects_of

    with contextlib.suppress(ImportError):
        # Since 0.7 it asks the driver, through cuda-python.
        common = importlib.import_module("flashinfer.mla._batch_mla._backends._fa_common")
        common._get_fa_shared_memory_limits = lambda device: (233472, 232448)
    found = {}
    for subject in subjects_of(flashinfer):
        if subject.needs == "sm100" or subject.name.startswith("triton."):
            continue
        with pretended_hopper():
            outcome, _ = runner.answer(runner.probes_of(subject)["0"], subject, "cuda")
        found[subject.name] = outcome.note
    shutil.which = lambda name: None
    for backend in ("fa2", "fa3"):
        found[f"kv_reuse {backend}"] = str(attention._not_compiled(backend))
    print(json.dumps(found))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as workspace:
        os.environ |= ARCHITECTURE | {"FLASHINFER_WORKSPACE_BASE": workspace}
        main()
