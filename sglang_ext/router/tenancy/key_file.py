"""Reading the file of API keys: the only place where keys are seen as they are."""

from __future__ import annotations

import os
import tomllib
from typing import Any

import aiofiles
import aiofiles.os
import orjson

from sglang_ext.cluster_key import shared_with
from sglang_ext.errors import ConfigError
from sglang_ext.router.tenancy.tenants import KeyEntry, parse_keys

MAX_FILE_BYTES = 16 << 20


async def read_key_file(path: str) -> tuple[KeyEntry, ...]:
    """The keys in a file of JSON, or of TOML if its name ends so.

    Raises:
        ConfigError: it cannot be read, others may read or write it, or its contents are wrong.
    """
    flag = "--api-keys-file"
    try:
        async with aiofiles.open(path, "rb") as file:
            _check_mode(path, await aiofiles.os.stat(file.fileno()))
            data = await file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", field=flag) from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes", field=flag)
    return parse_keys(_parse(path, data))


def _check_mode(path: str, status: os.stat_result) -> None:
    if (problem := shared_with(status, os.geteuid(), {os.getegid(), *os.getgroups()})) is not None:
        raise ConfigError(f"{path} {problem}", field="--api-keys-file", hint=f"chmod 600 {path}")


def _parse(path: str, data: bytes) -> Any:
    # The parser's message is left out: it may quote a key.
    try:
        if path.endswith(".toml"):
            return tomllib.loads(data.decode())
        return orjson.loads(data)
    except tomllib.TOMLDecodeError as error:
        where = str(error).rpartition("(at ")[2].rstrip(")")
        raise ConfigError(f"{path} is not valid TOML ({where})", field="--api-keys-file") from None
    except orjson.JSONDecodeError as error:
        line = f"line {error.lineno} column {error.colno}"
        raise ConfigError(f"{path} is not valid JSON ({line})", field="--api-keys-file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8", field="--api-keys-file") from None
