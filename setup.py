"""Maps the three folders onto one package; computed, so that no subpackage is missed."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
ROOTS = {"megaopt": "megaopt", "kernels": "megaopt.kernels", "integration": "megaopt.integration"}

package_dir = {name: folder for folder, name in ROOTS.items()}
packages = [
    f"{name}.{sub}" if sub else name
    for folder, name in ROOTS.items()
    for sub in ["", *find_packages(folder)]
]


class BuildWithConfigs(build_py):
    """Puts configs/ into the wheel, as megaopt/configs, so that `megaopt regress` runs anywhere."""

    def run(self):
        super().run()
        if self.editable_mode:  # there megaopt/lab/configs.py finds the folder itself
            return
        folder = Path(self.build_lib) / "megaopt" / "configs"
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted((HERE / "configs").glob("*.toml")):
            shutil.copy(path, folder)


def readme():
    """README.md with absolute links: an index shows it without the files beside it."""
    pyproject = (HERE / "pyproject.toml").read_text(encoding="utf-8")
    repository = re.search(r'^Repository = "(.+)"$', pyproject, re.MULTILINE)[1]
    text = (HERE / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\])\((?!https?:)", rf"\1({repository}/raw/main/", text)
    return re.sub(r"\]\((?!https?:|#)", f"]({repository}/blob/main/", text)


setup(
    packages=packages,
    package_dir=package_dir,
    package_data={
        "megaopt": ["py.typed"],
        "megaopt.kernels": ["native.cpp"],
        "megaopt.kernels.products": ["product.h"],
        "megaopt.lab.golden": ["record.json"],
        "megaopt.lab.regression": ["losses.json"],
    },
    cmdclass={"build_py": BuildWithConfigs},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
