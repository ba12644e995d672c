"""What pyproject.toml cannot say: the three packages, configs/ inside the first as jaxfp8rl/_presets, the
report's page."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["jaxfp8rl*", "pallas_kernels*", "bridges*"]), "jaxfp8rl._presets"],
    package_dir={"jaxfp8rl._presets": "configs"},
    package_data={"jaxfp8rl._presets": ["**/*.toml"], "jaxfp8rl.monitors.report": ["*.html", "*.css"]},
    include_package_data=False,
)
