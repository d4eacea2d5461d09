"""The project's test bench: servers, stand-ins, hosts of a lab, leak checks, comparisons of answers.

Imported as `tests.support`, with the root of the checkout on `sys.path`: `python -m` puts it there when it is
run in the root, and `pythonpath` in pyproject.toml does so for pytest. Nothing in `sglang_ext` imports it.
"""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
"""The root of the checkout: working directory or `PYTHONPATH` of child processes that run a module of it."""
