"""What a program of a Hopper kernel of MLA decode takes of a batch: its groups of warps, run as Python.

The functions that decide it are those of the kernels. What computes and what copies is left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from staleproof.ops.mla import e4m3, hopper

Segment = tuple[int, int, int]


class Nothing:
    """Stands for registers, shared memory and barriers: whatever is done with it gives it again."""

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Nothing:
        return self

    __getitem__ = __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __call__


class At:
    """An address in a list of numbers."""

    def __init__(self, numbers: torch.Tensor, at: Any = 0) -> None:
        self.numbers, self.at = numbers, at

    def __add__(self, more: Any) -> At:
        return At(self.numbers, self.at + more)


NOTHING = Nothing()
# Places for tiles of E4M3 numbers.
STAGES = 5


def number(x: Any) -> torch.Tensor:
    return torch.as_tensor(x, dtype=torch.int64)


def load(address: At, mask: Any = True, other: int = 0) -> torch.Tensor:
    at, mask = number(address.at), torch.as_tensor(mask)
    return torch.where(mask, address.numbers[torch.where(mask, at, 0)], other)


def store(address: At, value: Any) -> None:
    address.numbers[number(address.at)] = value


def language(program: int, programs: int) -> SimpleNamespace:
    """What these functions use of Gluon's language."""
    ids, sizes = (number(0), number(program)), (number(1), number(programs))
    return SimpleNamespace(
        **dict.fromkeys(
            ("full", "convert_layout", "BlockedLayout", "SliceLayout", "float16", "float32"), NOTHING
        ),
        int32=torch.int64,
        int64=torch.int64,
        arange=lambda start, end, layout: torch.arange(start, end),
        associative_scan=lambda x, axis, add: x.cumsum(axis),
        cdiv=lambda a, b: -(-a // b),
        constexpr=None,
        load=load,
        max=lambda x, axis: x.max(axis).values,
        maximum=lambda a, b: NOTHING if a is NOTHING else torch.maximum(number(a), number(b)),
        min=lambda x, axis: x.min(axis).values,
        minimum=lambda a, b: torch.minimum(number(a), number(b)),
        num_programs=lambda axis: sizes[axis],
        program_id=lambda axis: ids[axis],
        static_range=range,
        store=store,
        sum=lambda x, axis: NOTHING if x is NOTHING else x.sum(axis),
        where=lambda mask, a, b: torch.where(torch.as_tensor(mask), a, b),
    )


KEPT = (
    *("equal_part", "limit_of", "next_request", "own_requests", "own_split", "part_of", "pays_off", "share"),
    *("share_of", "split_of"),
)


@cache
def known(module: ModuleType) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a module names, functions of its kernels replaced by nothing; and these functions."""
    names: dict[str, Any] = {}
    functions: dict[str, Any] = {}
    for key, value in (vars(hopper) | vars(module)).items():
        if (fn := getattr(value, "fn", None)) is not None and inspect.isfunction(fn):
            functions[key] = fn
        names[key] = NOTHING if key in functions else getattr(value, "value", value)
    nothing = "mbarrier", "fence_async_shared", "barrier", "gdc_wait", "exp2"
    return names | dict.fromkeys(nothing, NOTHING), functions


def as_python(module: ModuleType, name: str, gl: SimpleNamespace, **instead: Any) -> Callable[..., Any]:
    """A kernel's function as Python, with those it calls; all but KEPT of these do nothing."""
    names, functions = known(module)
    names = names | {"gl": gl, "_add": None} | instead
    for key in (*KEPT, name):
        names[key] = FunctionType(functions[key].__code__, names)
    made: Callable[..., Any] = names[name]
    return made


class Share:
    """What the groups of one program take of a batch of single-row requests: (request, first tile, end)."""

    def __init__(self, lens: torch.Tensor, program: int, programs: int, aligned: int, length: int) -> None:
        self.gl, self.program, self.aligned = language(program, programs), number(program), number(aligned)
        self.lens, self.batch, self.most = At(lens), number(len(lens)), number(int(lens.max()))
        share_of = as_python(hopper, "share_of", self.gl)
        given = self.lens, self.batch, self.most, 1, number(0), self.aligned, length
        self._work = share_of(*given)

    @property
    def work(self) -> tuple[torch.Tensor, ...]:
        """Numbers of its own for each group: Python adds in place."""
        return tuple(number(x).clone() for x in self._work)

    def loaded(self, stages: int) -> tuple[list[Segment], int]:
        """By the loading group, and what it says to the merge."""
        found: list[Segment] = []
        cuts = torch.full((1,), 77)

        def queries(q_v: Any, q_r: Any, bar: Any, base: Any, *args: Any) -> None:
            found.append((int(base), 0, 0))

        def words(*args: Any) -> None:
            assert args[10] == sum(end - begin for _, begin, end in found)
            found[-1] = (found[-1][0], int(args[7]), int(args[8]))

        def tiles(*args: Any) -> None:
            before = [end - begin for _, begin, end in found]
            # Even tiles and odd ones: the phases of their barriers, which the computing groups count as well.
            assert args[11:13] == (sum((n + 1) // 2 for n in before), sum(n // 2 for n in before))
            found[-1] = (found[-1][0], int(args[8]), int(args[9]))

        load_group = as_python(
            hopper, "load_group", self.gl, load_queries=queries, _copy_words=words, _copy_tiles=tiles
        )
        memory = (*[NOTHING] * 8, number(0), NOTHING, At(torch.zeros(1)), self.lens, At(cuts))
        strides, table = (1, 0, 0), 0
        of_rows = self.most, 1, number(1), number(0), number(1), number(0), self.work
        load_group(*memory, *strides, 0, 0, table, *of_rows, 64, 16, stages, False, False, True)
        return found, int(cuts[0])

    def computed(self, kernel: str, group: int) -> list[tuple[int, int, int]]:
        """By a computing group: of each (request, tiles, slot)."""
        found: list[tuple[int, int, int]] = []
        # Of the request; even and odd ones of all requests.
        done, even, odd = [0], [0], [0]

        def step(tiles: int, used: int) -> Callable[..., Any]:
            """``used``: where the arguments have the phases, of which one tile needs the first."""

            def run(*args: Any) -> tuple[Nothing, ...]:
                both = tiles == 2 and (kernel == "few" or group == 1 or args[-2])
                assert args[used] == even[0]
                assert not both or args[used + 1] == odd[0]
                done[0] += 1 + both
                even[0] += 1
                odd[0] += both
                return (NOTHING,) * (4 if kernel == "few" else 3)

            return run

        def stored(row: int, slot: int) -> Callable[..., Any]:
            def run(*args: Any) -> None:
                assert args[row - 1] == len(found)
                found.append((int(args[row]), done[0], int(args[slot])))
                done[0] = 0

            return run

        def added(acc: Any, stage: Any, *args: Any) -> Nothing:
            assert stage == even[0] % STAGES
            done[0] += 1
            even[0] += 1
            return NOTHING

        common = NOTHING, self.lens, self.most, 1, number(1)
        if kernel == "pairs":
            run = as_python(
                *(hopper, "_pairs_group", self.gl),
                even_step=step(2, 9),
                odd_step=step(2, 9),
                lone_step=step(1, 7),
                _pairs_store=stored(9, 11),
            )
            memory = [NOTHING] * 4
            run(*memory, *common, *self._rows(), group, False, False)
        elif kernel == "few":
            run = as_python(hopper, "_few_group", self.gl, _few_step=step(1, 8), _few_store=stored(10, 12))
            memory = [NOTHING] * 5
            run(*memory, *common, number(0), self.program, self.work, 1.0, group)
        else:
            run = as_python(e4m3, "_group", self.gl, _add_values=added, _store=stored(7, 9))
            half = SimpleNamespace(index=lambda stage: stage)
            memory = [*[NOTHING] * 5, half, half, *[NOTHING] * 3]
            run(memory, *[NOTHING] * 3, *common, *self._rows(), group, 16, STAGES, False)
        return found

    def _rows(self) -> tuple[Any, ...]:
        return number(0), number(1), number(0), self.program, self.work, 1.0
