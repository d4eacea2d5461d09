"""A model's settings by name, so that two servers can report which of them differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

VOLATILE: Final = frozenset({"_name_or_path", "name_or_path", "transformers_version", "architectures_path"})
"""Settings that differ between copies of one model."""
LETTERS: Final = 80
"""Characters of a setting that are sent to other servers; a longer one is cut and sent with its digest."""
MOST_WITHIN: Final = 32
"""Entries of a nested setting up to which each is sent by its own name. A larger one, such as the labels of a
classifier, is sent as a single setting."""


def model_settings(hf_config: Any) -> dict[str, str]:
    """A model's configuration, setting by setting, as text: the input of `model_identity.config_digest`.

    Settings within others have names such as ``rope_scaling.factor``.
    """
    found: dict[str, str] = {}

    def add(prefix: str, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if key in VOLATILE:
                continue
            if isinstance(value, Mapping) and len(value) <= MOST_WITHIN:
                add(f"{prefix}{key}.", value)
                continue
            text = json.dumps(value, sort_keys=True, default=str)
            if len(text) > LETTERS:
                digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
                text = f"{text[:LETTERS]}... ({digest})"
            found[f"{prefix}{key}"] = text

    add("", hf_config.to_dict())
    return found
