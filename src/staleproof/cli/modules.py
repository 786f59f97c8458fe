"""``staleproof moe-module``: FlashInfer's fused MoE, compiled for incident 3."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from staleproof.cli.common import BadInputError, in_one_line

moe_module = typer.Typer(
    help="FlashInfer's fused MoE, reduced to what incident 3 needs and compiled from its sources."
)


@moe_module.command("build")
@in_one_line
def build_moe_module(
    package_root: Annotated[
        Path | None, typer.Option(help="Folder with an unpacked flashinfer; the installed one by default.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Where the modules go; $STALEPROOF_MOE_MODULES or the user's cache.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compilations at a time; one a core by default.")
    ] = None,
) -> None:
    """Compile the modules with and without the bounds check. Needs nvcc, and minutes."""
    from staleproof.kernels.moe_module import ModuleError, build

    try:
        build(package_root, cache=cache, jobs=jobs, say=typer.echo)
    except ModuleError as error:
        raise BadInputError(str(error)) from error
