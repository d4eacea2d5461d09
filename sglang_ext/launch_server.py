"""``python -m sglang_ext.launch_server``: SGLang's server with the plugin and, without a GPU, a CPU runtime.

Takes every flag of ``python -m sglang.launch_server``. On a host without an accelerator the flags that a CPU
needs become the defaults, and what stock SGLang lacks there is patched (:mod:`sglang_ext.patches`). On a GPU
host it is SGLang's server with the plugin, which ``python -m sglang.launch_server`` is too.

SGLang starts its scheduler and detokenizer as spawned processes, and a spawned process imports its parent's
main module first: this one. The import therefore prepares the process, before anything of SGLang. (On a CPU
they are forked where that is safe: :mod:`sglang_ext.patches.cpu.fork`.)
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import entry_points

# First: it finds the memory of the command line, where titles such as sglang::scheduler are written, by way
# of the environment, and cannot once that has been changed.
import setproctitle  # noqa: F401

from sglang_ext.cluster_key import read_secret
from sglang_ext.config import KvConfig
from sglang_ext.errors import UserError
from sglang_ext.flags.help import COMMON, help_words
from sglang_ext.patches import environment
from sglang_ext.patches.cpu import runtime

PLUGIN = "sglang_ext"

if runtime.active(os.environ):
    # A child of a CPU server (or the server itself, imported again).
    runtime.prepare_process(os.environ)


def require_plugin() -> None:
    """Make sure that SGLang will load the plugin, here and in every scheduler process."""
    if not any(ep.name == PLUGIN for ep in entry_points(group="sglang.srt.plugins")):
        raise SystemExit(
            "sglang_ext.launch_server: the package is not installed, so SGLang cannot find its plugin; "
            "run `pip install -e .` in the source folder."
        )
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    names = [name.strip() for name in allowed.split(",") if name.strip()]
    if names and PLUGIN not in names:
        os.environ["SGLANG_PLUGINS"] = ",".join([*names, PLUGIN])


KEY_FILE_FLAG = "--api-key-file"


def with_key(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """The arguments with SGLang's ``--api-key`` in place of our ``--api-key-file``, and that key.

    Every user of the machine can see a key on a command line; these arguments stay in this process.

    Raises:
        ConfigError: the file cannot be used.
    """
    found: list[str] = []
    key = None
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name != KEY_FILE_FLAG:
            found.append(word)
            continue
        path = value if equals else next(words, "")
        key = read_secret(path, field=KEY_FILE_FLAG).decode("utf-8", "replace")
    return (found if key is None else [*found, f"--api-key={key}"]), key


class Hides(logging.Filter):
    """Keeps a key out of the log, where SGLang writes all of its arguments at the start."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if self._key in text:
            record.msg, record.args = text.replace(self._key, "***"), None
        return True


REPORT_FLAG = "--enable-cache-report"
NO_REPORT_FLAG = "--no-cache-report"


def with_report(argv: Sequence[str]) -> list[str]:
    """The arguments with SGLang's ``--enable-cache-report``, unless ours says no: without it OpenAI's
    ``usage.prompt_tokens_details.cached_tokens``, where people look first, stays empty."""
    found = [word for word in argv if word != NO_REPORT_FLAG]
    return found if len(found) < len(argv) or REPORT_FLAG in found else [*found, REPORT_FLAG]


HELP_FLAGS = ("-h", "--help")
OURS = "kv"
"""After a help flag: the common flags of this package alone."""


def show_help(argv: Sequence[str]) -> None:
    """Show the flags of this package and end, for ``--help kv``, ``--help all`` or ``--help GROUP``. For a
    plain ``--help``, SGLang will show all flags, without the warnings of its imports before them."""
    word = COMMON if argv[-1] == OURS else argv[-1]
    if argv[-2:-1] and argv[-2] in HELP_FLAGS and word in help_words(KvConfig.options()):
        KvConfig.parser(
            word,
            prog="sglang-ext serve",
            usage="sglang-ext serve --model-path MODEL [--kv-...] [flags of SGLang's server]",
            description="Flags of the shared KV cache. A plain --help shows those of SGLang's server too.",
        ).print_help()
        raise SystemExit(0)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def main(argv: list[str]) -> None:
    """Start the server and serve until it is stopped."""
    environment.printable()
    if set(HELP_FLAGS) & set(argv):
        show_help(argv)
    require_plugin()
    try:
        environment.prepare(os.environ, argv)
        environment.restart_in_utf8()
        environment.require_short_sockets(os.environ)
        argv, key = with_key(with_report(argv))
    except UserError as error:
        raise SystemExit(f"sglang_ext.launch_server: error: {error}") from None
    if key is not None:
        logging.getLogger("sglang.srt.entrypoints.engine").addFilter(Hides(key))
    if runtime.wanted(argv, os.environ):
        if runtime.COMPILING_FLAG in argv:
            os.environ.setdefault(runtime.COMPILING, "0")
        runtime.prepare_process(os.environ)
        reason = runtime.unsupported_host(platform.machine())
        if reason is not None:
            raise SystemExit(f"sglang_ext.launch_server: error: {reason}")

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from sglang_ext.patches import plugin, readiness

    load_plugins()
    atexit.unregister(plugin.explain)  # as this refuses to start without it
    try:
        readiness.require()
        server_args = prepare_server_args(argv)
    except (UserError, readiness.NotReadyError) as error:
        raise SystemExit(f"sglang_ext.launch_server: error: {error}") from None
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
