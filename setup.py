"""What pyproject.toml cannot say: a wheel with compiled modules in it (`make compile`) is of its platform."""

from pathlib import Path

from setuptools import Distribution, setup

COMPILED = Path(__file__).parent / "sglang_ext" / "_native"


class OfItsPlatform(Distribution):
    """Of any platform, without compiled modules."""

    def has_ext_modules(self) -> bool:
        return COMPILED.is_dir()


setup(distclass=OfItsPlatform, ext_modules=[])
