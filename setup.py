"""All metadata is in pyproject.toml. This file puts configs/, examples/ and the pages of docs/, which lie beside the
package in a checkout, into it in a wheel: `dppo_megatron.config.paths` finds them in either place."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("configs", "examples")


class BuildWithConfigs(build_py):
    """As `build_py`, and the directories of `SHIPPED` beside it."""

    def run(self):
        super().run()
        if self.editable_mode:  # the checkout itself is imported
            return
        here = Path(__file__).parent
        for name in SHIPPED:
            target = Path(self.build_lib) / "dppo_megatron" / "shipped" / name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(here / name, target, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        docs = Path(self.build_lib) / "dppo_megatron" / "shipped" / "docs"
        docs.mkdir(parents=True, exist_ok=True)
        for page in (*(here / "docs").glob("*.md"), here / "docs" / "other_names.txt"):
            shutil.copy(page, docs)


setup(cmdclass={"build_py": BuildWithConfigs})
