"""A router's own API from Python: hints, documents, sessions, confirmations of answers, explanations.

Needs nothing but Python 3.9 or later. Prompts go to the router by the client library of their API (OpenAI's,
Anthropic's, any other); these calls stand beside them:

    client = Client("http://127.0.0.1:30000")
    client.put_document("manual", text=manual)
    reviewer = client.session("reviewer")
    reviewer.hint(earliest_s=2.0)                                    # its KV is brought up meanwhile
    openai.chat.completions.create(..., extra_headers=reviewer.headers)

The package ``sglang-ext-client`` has this folder as ``sglang_ext_client``.
"""

from __future__ import annotations

from .client import Client, Confirmation, RouterError, Session, confirmation
from .hints import Announcement, Hints, advise
from .types import Divergence, Document, Explanation, Hint

__all__ = [
    "Announcement",
    "Client",
    "Confirmation",
    "Divergence",
    "Document",
    "Explanation",
    "Hint",
    "Hints",
    "RouterError",
    "Session",
    "advise",
    "confirmation",
]
