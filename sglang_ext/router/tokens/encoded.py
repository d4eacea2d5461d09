"""A prompt in the form of the indexes: its namespace and its key."""

from __future__ import annotations

import msgspec

from sglang_ext.keys import TOKEN_BYTES


class Encoded(msgspec.Struct, frozen=True):
    """A prompt's namespace and key in the prompt trees."""

    namespace: tuple[str | None, ...]
    key: bytes
    tokens: int | None
    """Its length; ``None`` when ``key`` is text."""

    @property
    def salt(self) -> str | None:
        """The ``cache_salt`` of the prompt; see ``PromptInput.salt``."""
        return self.namespace[-1] if len(self.namespace) > 1 else None

    @property
    def units(self) -> int:
        """Length in the unit of matches: tokens, or 4 bytes of text."""
        return len(self.key) // TOKEN_BYTES
