"""Where a prefill is cut so that a state is kept there: pure.

A request resumes only where a state is. SGLang keeps states where chunks and requests end. A repeat of a
prompt finds none: it may reuse all tokens but the last, and the state is behind the last. Neither does a
prompt that forks from another. A state is kept in three more places:

    where prompts fork   known once a second prompt shares KV further than any state
    at breakpoints       where the client says that other prompts begin alike (Anthropic's ``cache_control``)
    near a prompt's end  ahead of a repeat: regenerate, ``n`` above 1, the next turn without its reasoning

A cut costs a forward pass over few tokens. The state at a fork or breakpoint costs memory, too. That near a
prompt's end takes the place of the one at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

PASS_TOKENS: Final = 256
"""A forward pass over few tokens takes about as long as one over so many."""
AHEAD: Final = 8
"""A state ahead of a repeat must save the cost of its forward pass so many times: most prompts come once."""
STATE_SHARE: Final = 8
"""A state at a fork must save one in so many of the tokens whose KV would take its memory."""
TAIL: Final = 8
"""Tokens of a prompt behind its last state. The next turn may lack them: in the templates of reasoning models
they open the answer."""


@dataclass(frozen=True)
class Forks:
    """How many tokens of computing a state must save.

    known: where prompts are known to fork. ahead: near the end of a prompt that has come once.
    """

    known: int
    ahead: int

    @classmethod
    def of(cls, state_bytes: int, kv_bytes_per_token: int) -> Forks:
        """For a model.

        Args:
            state_bytes: of all layers' states at one place.
            kv_bytes_per_token: of all layers whose KV is kept for every token; 0 if not known.
        """
        memory = state_bytes // (STATE_SHARE * kv_bytes_per_token) if kv_bytes_per_token else 0
        known = max(PASS_TOKENS, memory)
        return cls(known, max(known, AHEAD * PASS_TOKENS))

    def cut(
        self, start: int, prompt: int, shared: int, *, forks: bool = False, breakpoints: Sequence[int] = ()
    ) -> int | None:
        """Where the next chunk of a prefill should end at the latest, in tokens from the prompt's beginning.

        Args:
            start: where the chunk begins; a state is there, or it is 0.
            prompt: the prompt's length.
            shared: up to where the prompt's KV is there from other prompts, with or without a state.
            forks: whether another prompt is likely to fork near this one's end.
            breakpoints: where others are said to begin like this one, in any order.

        Returns:
            A place behind `start` and before the prompt's end; None to go on as far as SGLang does.
        """
        last = prompt - TAIL
        places = [place for place in (min(shared, last), *breakpoints) if self.known <= place - start]
        if places and (first := min(places)) <= last:
            return first
        return last if last - start >= (self.known if forks else self.ahead) else None

    @staticmethod
    def replaces_end(start: int, prompt: int) -> bool:
        """Whether the state at `start` stands for the one at a prompt's end."""
        return start > 0 and prompt - start <= TAIL
