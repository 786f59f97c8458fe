"""The packages of the audit that a CPU can run, unpacked in the audit's cache: what CI fetches.

    python tests/contract/fetch.py

Without a network each is one line that says so, and its tests are skipped. vLLM's sources are fetched by
``tests/vllm/environment.py``. Nothing is installed into this environment.
"""

from __future__ import annotations

import re
import subprocess

from staleproof.kernels import packages

# Distribution -> the release that drafts in workbook/upstream are about.
WANTED = ("fla-core", "0.6.0"), ("flashinfer-python", "0.7.2.post1"), ("liger-kernel", "0.8.5")
WANTED += (("sglang", "0.5.23"),)


def fetch(name: str, version: str) -> str:
    """Unpack one release, unless it is there.

    Returns:
        One line: where it is, or why it is not there.
    """
    folder = packages.cache() / f"{re.sub(r'[-_.]+', '_', name)}-{version}"
    try:
        if not folder.exists():
            packages.fetch(f"{name}=={version}", ".*", folder)
    except subprocess.CalledProcessError as error:
        return f"{name} {version} was not fetched, its tests are skipped: pip ended with {error.returncode}"
    return f"{name} {version}: {folder}"


if __name__ == "__main__":
    for wanted in WANTED:
        print(fetch(*wanted), flush=True)
