"""The packages of the audit that a CPU can run, unpacked in the audit's cache: what CI fetches.

    python tests/contract/fetch.py

Without a network each is one line that says so, and its tests are skipped. vLLM's sources are fetched by
``tests/vllm/environment.py``. Nothing is installed into this environment.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from staleproof.kernels import packages

# Distribution -> the release that drafts in workbook/upstream are about.
WANTED = {
    "fla-core": "0.6.0",
    "flashinfer-python": "0.7.2.post1",
    "liger-kernel": "0.8.5",
    "sglang": "0.5.23",
}


def fetch(name: str, version: str) -> str:
    """Unpack one release, unless it is there.

    Returns:
        One line: where it is, or why it is not there.
    """
    folder = packages.cache() / f"{re.sub(r'[-_.]+', '_', name)}-{version}"
    if folder.exists():
        return f"{name} {version}: {folder}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        draft = Path(made) / "draft"
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
        command += ["--disable-pip-version-check", "--target", str(draft), f"{name}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
            return f"{name} {version} was not fetched, so its tests are skipped: {last}"
        # Another process may have been faster.
        if not folder.exists():
            draft.rename(folder)
    return f"{name} {version}: {folder}"


if __name__ == "__main__":
    for wanted in WANTED.items():
        print(fetch(*wanted), flush=True)
