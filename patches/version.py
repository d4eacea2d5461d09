"""The version of SGLang that the patches were written for."""

from importlib.metadata import PackageNotFoundError, version

SGLANG_VERSION = "0.5.21"


def installed_sglang_version() -> str:
    """The version of the installed SGLang, or "(not installed)"."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "(not installed)"
