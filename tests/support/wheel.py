"""The wheel of this checkout, for tests of what is installed: of its sdist, which holds what MANIFEST.in says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from support.job import REPOSITORY

_SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
_SOURCES += ("dppo_megatron", "configs", "examples", "docs")


def build_wheel(folder: Path) -> Path:
    """Built in `folder` from the sdist of a copy, so that nothing of the build stays in the checkout, and with the
    installed setuptools, so that nothing is fetched."""
    source, out = folder / "source", folder / "wheel"
    source.mkdir()
    for name in _SOURCES:
        path, skip = REPOSITORY / name, shutil.ignore_patterns("__pycache__", "*.egg-info")
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=skip)
        else:
            shutil.copy(path, source / name)
    pack = [sys.executable, "-c", "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"]
    done = subprocess.run([*pack, str(folder)], cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [sdist] = folder.glob("*.tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out)]
    done = subprocess.run([*command, str(sdist)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = out.glob("*.whl")
    return built
