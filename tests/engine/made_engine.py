"""A made-up engine on the CPU, and modules that stand in for vLLM's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from types import SimpleNamespace as Space
from typing import Any

import pytest
import torch

from staleproof.engine.probes import Engine
from staleproof.engine.spies import Rows, checksum

NAN = float("nan")


def sums(logits: torch.Tensor) -> list[int]:
    """What :func:`checksum` gives each row, by hand."""
    return [sum(int(v) * (2 * i + 1) for i, v in enumerate(row)) for row in logits.view(torch.int32)]


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    """Make a module of this name importable, with these members, and the packages around it."""
    parent, _, last = name.rpartition(".")
    module = sys.modules.get(name) or ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    if parent:
        setattr(stand_in(monkeypatch, parent), last, module)
    vars(module).update(members)
    return module


class Server:
    """Serves as an engine with graphs of 8 and 64 rows: the padding rows of a step are NaN.

    Attributes:
        served: prompts and keywords of the parameters of each call.
        step: called with the number of requests and the rows of each decode step.
        nan: requests whose logprobs are NaN.
        deaf: the logits do not depend on the prompt.
        bare: outputs have no logprobs.
    """

    def __init__(self, watch: Rows) -> None:
        self.watch, self.served, self.deaf, self.bare = watch, [], False, False
        self.nan: set[int] = set()
        self.step: Callable[[int, int], object] = lambda live, size: None

    def generate(self, asked: list[Any], parameters: list[Space], use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        self.served.append((asked, [vars(one) for one in parameters]))
        live, size = len(asked), 8 if len(asked) <= 8 else 64
        firsts = [0 if self.deaf else one["prompt_token_ids"][0] for one in asked]
        for step in range(parameters[0].max_tokens):
            out = torch.ones(size, 2)
            out[live:] = NAN
            self.watch.keep("layers.0.attention", out)
            self.step(live, size)
            logits = torch.tensor([[float(first + step), 1.0] for first in firsts] + [[0.0, 0.0]])
            self.watch.sums.append(checksum(logits))
        return [
            Space(
                outputs=[
                    Space(
                        token_ids=(first, number),
                        logprobs=None
                        if self.bare
                        else [{7: Space(logprob=NAN if number in self.nan else -0.5)}] * 2,
                    )
                ]
            )
            for number, first in enumerate(firsts)
        ]


@pytest.fixture(name="engine")
def engine_fixture(monkeypatch):
    """An engine around a :class:`Server`; its worker's runner, scheduler and configuration are empty."""
    watch = Rows()
    llm = Server(watch)
    llm.worker = Space(model_runner=Space())
    core = Space(model_executor=Space(driver_worker=Space(worker=llm.worker)), scheduler=Space())
    llm.llm_engine = Space(engine_core=Space(engine_core=core), vllm_config=Space())
    stand_in(monkeypatch, "vllm", SamplingParams=Space)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return Engine(llm, watch, 12.34)
