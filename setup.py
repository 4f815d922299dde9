"""Maps the three folders onto one package; computed, so that no subpackage is missed."""

from setuptools import find_packages, setup

ROOTS = {"megaopt": "megaopt", "kernels": "megaopt.kernels", "integration": "megaopt.integration"}

package_dir = {name: folder for folder, name in ROOTS.items()}
packages = [
    f"{name}.{sub}" if sub else name
    for folder, name in ROOTS.items()
    for sub in ["", *find_packages(folder)]
]

setup(
    packages=packages,
    package_dir=package_dir,
    package_data={
        "megaopt.kernels.step": ["native.cpp"],
        "megaopt.commands.golden": ["record.json"],
    },
)
