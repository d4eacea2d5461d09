"""A prompt in the form of the indexes: its namespace and its key."""

from __future__ import annotations

import msgspec

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.router.index.prompt_trees import BEGINNING


class Encoded(msgspec.Struct, frozen=True):
    """A prompt's namespace and key in the prompt trees."""

    namespace: tuple[str | None, ...]
    """First its kind: ``tokens``, ``text`` or ``BEGINNING``."""
    key: bytes
    tokens: int | None
    """Its length; ``None`` when ``key`` has text."""
    begins: int = 0
    """With the kind ``BEGINNING``: how many tokens ``key`` begins with."""

    @property
    def salt(self) -> str | None:
        """The ``cache_salt`` of the prompt; see ``PromptInput.salt``."""
        return self.namespace[-1] if len(self.namespace) > 1 else None

    @property
    def units(self) -> int:
        """Length in the unit of matches: tokens, or 4 bytes of text."""
        return len(self.key) // TOKEN_BYTES

    @property
    def known(self) -> Encoded:
        """As far as its tokens are known: the prompt before its first picture, else the prompt as it is."""
        if self.namespace[0] != BEGINNING:
            return self
        namespace = ("tokens", *self.namespace[1:])
        return Encoded(namespace, self.key[: self.begins * TOKEN_BYTES], self.begins)
