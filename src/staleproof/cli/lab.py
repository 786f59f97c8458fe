"""``staleproof lab``: JupyterLab on the notebooks."""

from __future__ import annotations

import os
import sys

import typer

from staleproof.cli.common import BadInputError


def lab(context: typer.Context) -> None:
    """Open JupyterLab on the notebooks and the book.

    The glossary, the timeline and the recorded runs are in its file browser, under workbook/.
    What follows -- goes to JupyterLab. It refuses to run as root: in a container say --allow-root,
    and whoever reaches its port with the token is root there; elsewhere use another user.

    \b
    Examples:
      staleproof lab
      staleproof lab -- --port 8889 --no-browser
      staleproof lab -- --allow-root --ip 0.0.0.0
    """
    from staleproof.cases import store
    from staleproof.device import need_workbook

    root = store.checkout()
    need_workbook("jupyterlab", "ipykernel")
    given = context.args
    if os.geteuid() == 0 and not any("allow-root" in one or "allow_root" in one for one in given):
        raise BadInputError(
            "lab: JupyterLab refuses to run as root; in a container type "
            f"{' '.join(['staleproof lab -- --allow-root', *given])}, elsewhere run it as another user"
        )
    ours = {
        "root_dir": f"--ServerApp.root_dir={root}",
        "default_url": "--LabApp.default_url=/lab/tree/notebooks/00_orientation.ipynb",
    }
    # JupyterLab takes each option once: one that is given replaces ours.
    ours = {name: option for name, option in ours.items() if not any(name in one for one in given)}
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *ours.values(), *given])
