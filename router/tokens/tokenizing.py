"""From prompts to the keys under which the prompt trees know them.

Rendering and tokenizing take milliseconds for long prompts, so they run in a pool of threads, with a
cache of what was tokenized before (``segments``). The tokenizer comes from the path that the workers
report. Before its tokens are trusted, they are compared with a worker's own (``/v1/tokenize``) on a few
prompts and conversations.

Where tokens cannot be had, a prompt is matched by its text instead, in units of 4 bytes: that finds the
instance which saw the same beginning, and cannot tell lengths.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from sglang_ext.errors import UserError
from sglang_ext.keys import TOKEN_BYTES, decode_tokens, encode_tokens
from sglang_ext.router.api.job import Chat, Job, PromptInput
from sglang_ext.router.api.validation import Json
from sglang_ext.router.fleet.facts import InstanceFacts
from sglang_ext.router.http.types import RequestRefused
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.tokens.chat_template import CannotRender, TemplateFailed, text_of
from sglang_ext.router.tokens.encoded import Encoded
from sglang_ext.router.tokens.prompt_tokenizer import PromptTokenizer, load_tokenizer
from sglang_ext.router.tokens.segments import Segmenter, TokenCache, TooMuchNew
from sglang_ext.router.tokens.tokenizer_check import ServerTokenizer, Trust, compare
from sglang_ext.signals import Signal

logger = logging.getLogger("router.tokenizing")


INLINE_BYTES = 1 << 16
"""Prompts up to this length are rendered and looked up on the event loop, if no more than ``INLINE_NEW``
characters of them have to be tokenized: a thread and back takes longer than that."""
INLINE_NEW = 512
MOST_THREADS = 8
LARGE_ANSWER = 16_384
"""Bytes of an answer from which it is not parsed on the event loop."""
LARGE = 8192
"""What is taken for the length of what is not plain text."""


class Fallback(enum.StrEnum):
    """Why a prompt is matched by its text; a label of metrics."""

    NO_TOKENIZER = "no-tokenizer"
    OPAQUE = "media-or-embeddings"
    COMPLETION_TEMPLATE = "completion-template"
    UNTRUSTED = "tokens-differ"
    """The comparison with a worker's tokens failed, or is still to be made."""
    REQUEST = "request"
    """The request uses something that is not rendered here."""


class TokenizerService:
    """Encodes jobs off the event loop, as well as the state of affairs allows.

    Args:
        threads: size of the pool; 0 for the number of cores, from 2 to ``MOST_THREADS``.
        cache_bytes: memory for tokens of segments.
        path: where the tokenizer is, instead of the path that the workers report.
    """

    def __init__(
        self,
        *,
        threads: int,
        cache_bytes: int,
        path: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        threads = threads or min(max(2, len(os.sched_getaffinity(0))), MOST_THREADS)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="router-tokenizer")
        self._path = path
        self._trust_remote_code = trust_remote_code
        self.fell_back: Signal[[Fallback]] = Signal()
        """A prompt is matched by its text; in any thread."""
        self._cache_bytes = cache_bytes
        self.cache = TokenCache(cache_bytes)
        self.tokenizer: PromptTokenizer | None = None
        self.trust = Trust()
        self.status = "no model yet"
        """Whether prompts are tokenized, and if not, why, for people."""

    @property
    def shows_in_place(self) -> bool:
        """Whether the model is known to see system messages in the midst of a conversation."""
        return self.tokenizer is not None and self.tokenizer.shows_in_place

    def measure(self, metrics: RouterMetrics) -> None:
        """Show how much of the prompts was seen before, and count what is matched by text."""
        untokenized = metrics.counter("untokenized_prompts", "Prompts matched by text", "why")
        self.fell_back.subscribe(lambda why: untokenized.labels(why).inc())
        size = metrics.gauge("token_cache_bytes", "Memory of tokens kept for prompts seen before")
        hits = metrics.gauge("token_cache_hits", "Segments found tokenized, since the model was loaded")
        misses = metrics.gauge("token_cache_misses", "Segments tokenized, since the model was loaded")

        def refresh() -> None:
            size.set(self.cache.size_bytes)
            hits.set(self.cache.hits)
            misses.set(self.cache.misses)

        metrics.refreshing.subscribe(refresh)

    async def load(self, facts: InstanceFacts) -> None:
        """Take on the tokenizer of a model. Never raises for a tokenizer that cannot be had: prompts are
        then matched by text, and the log says so."""
        self.tokenizer = None
        self.trust = Trust()
        self.cache = TokenCache(self._cache_bytes)
        path = self._path or facts.tokenizer_path
        loop = asyncio.get_running_loop()
        try:
            self.tokenizer = await loop.run_in_executor(self._pool, self._load, path, facts)
        except UserError as error:
            self.status = f"prompts are matched by text, not by tokens: {error}"
            logger.warning("%s", self.status)
            return
        self.status = f"tokenizer of {path}"
        logger.info(
            "tokenizer loaded from %s; cached by %s",
            path,
            self.tokenizer.segmenter.cached_by,
        )

    def _load(self, path: str, facts: InstanceFacts) -> PromptTokenizer:
        tokenizer = load_tokenizer(path, trust_remote_code=self._trust_remote_code)
        return PromptTokenizer(tokenizer, facts, self.cache)

    async def encode(
        self, job: Job, *, completion_template: bool = False, answer_follows: bool = True
    ) -> list[Encoded]:
        """The keys of all prompts of a job.

        Args:
            completion_template: the server rewrites the prompts of ``/v1/completions``.
            answer_follows: see ``PromptTokenizer.encode_chat``.
        """
        prompts = job.prompts
        if sum(map(_size, prompts)) <= INLINE_BYTES:
            try:
                return self.encode_all(prompts, completion_template, answer_follows, INLINE_NEW)
            except TooMuchNew:
                pass  # then in a thread
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._pool, self.encode_all, prompts, completion_template, answer_follows
        )

    async def verify(self, theirs: ServerTokenizer) -> None:
        """Compare with a worker's own tokens, and trust what agrees.

        Args:
            theirs: asks the worker; what it raises is passed on.
        """
        self.trust = await compare(self._sample, theirs)

    async def _sample(self, body: Json) -> list[int] | None:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return None
        if "prompt" in body:
            encode = functools.partial(tokenizer.encode_text, body["prompt"])
        else:
            encode = functools.partial(tokenizer.encode_chat, Chat(body))
        try:
            key = await asyncio.get_running_loop().run_in_executor(self._pool, encode)
        except CannotRender as error:
            logger.warning("the router cannot tokenize all that the worker can: %s", error)
            return None
        return [int(token) for token in decode_tokens(key)]

    def encode_all(
        self,
        prompts: Sequence[PromptInput],
        completion_template: bool = False,
        answer_follows: bool = True,
        most_new: int | None = None,
    ) -> list[Encoded]:
        """``encode`` in the calling thread.

        Args:
            most_new: see ``Segmenter.encode``, for each prompt.

        Raises:
            TooMuchNew: one of them has more.
        """
        return [self._encode_one(prompt, completion_template, answer_follows, most_new) for prompt in prompts]

    def _encode_one(
        self, prompt: PromptInput, completion_template: bool, answer_follows: bool, most_new: int | None
    ) -> Encoded:
        if prompt.ids is not None and not prompt.media:
            return _from_ids(prompt)
        tokenizer = self.tokenizer
        fallback = self._cannot(prompt, completion_template)
        if fallback is None and tokenizer is not None:
            try:
                if prompt.chat is not None:
                    key = tokenizer.encode_chat(
                        prompt.chat,
                        answer_follows=answer_follows,
                        most_new=most_new,
                        salt=prompt.salt,
                    )
                elif prompt.pair is not None:
                    key = tokenizer.encode_pair(prompt.pair, most_new, prompt.salt)
                else:
                    key = tokenizer.encode_text(prompt.text or "", most_new, prompt.salt)
                return Encoded(("tokens", *prompt.namespace), key, len(key) // TOKEN_BYTES)
            except TemplateFailed as failed:
                if prompt.chat is not None and prompt.chat.payload.get("chat_template_kwargs"):
                    raise RequestRefused(
                        f"chat_template_kwargs cannot be used: {failed}",
                        param="chat_template_kwargs",
                        code="invalid_value",
                    ) from failed
                logger.debug("matched by text: %.200s", failed)
                fallback = Fallback.REQUEST
            except CannotRender as error:
                logger.debug("matched by text: %.200s", error)
                fallback = Fallback.REQUEST
        self.fell_back(fallback or Fallback.NO_TOKENIZER)
        if prompt.chat is not None:
            raw = text_of(prompt.chat.payload).encode()
        elif prompt.ids is not None:
            raw = prompt.media.encode() + encode_tokens(prompt.ids)
        elif prompt.pair is not None:
            raw = (prompt.media + prompt.pair.query + prompt.pair.document).encode()
        else:
            raw = (prompt.media + (prompt.text or "")).encode()
        return Encoded(("text", *prompt.namespace), raw[: len(raw) // TOKEN_BYTES * TOKEN_BYTES], None)

    def _cannot(self, prompt: PromptInput, completion_template: bool) -> Fallback | None:
        if self.tokenizer is None:
            return Fallback.NO_TOKENIZER
        if prompt.opaque:
            return Fallback.OPAQUE
        if prompt.chat is None:
            if completion_template:
                return Fallback.COMPLETION_TEMPLATE
            return None if self.trust.text else Fallback.UNTRUSTED
        with_tools = bool(prompt.chat.payload.get("tools"))
        return None if (self.trust.tools if with_tools else self.trust.chat) else Fallback.UNTRUSTED

    def short_continuations(
        self, texts: Callable[[], Mapping[int, str]], salts: Sequence[str | None], size: int
    ) -> dict[int, bytes] | None:
        """As ``continuations``, in the calling thread; ``None`` where that would take too long.

        Args:
            texts, salts: as there.
            size: bytes of the answer that it looks at.
        """
        if self.tokenizer is None:
            return {}
        if size < LARGE_ANSWER:
            with contextlib.suppress(TooMuchNew):
                return _encoded(self.tokenizer.segmenter, texts, salts, INLINE_NEW)
        return None

    async def continuations(
        self, texts: Callable[[], Mapping[int, str]], salts: Sequence[str | None]
    ) -> dict[int, bytes]:
        """The tokens of generated texts, to be put behind the tokens of their prompts.

        The last token of a prompt and the first of an answer are taken not to merge, which chat templates
        see to; where they would, a little of the next turn's prefix is not foreseen.

        Args:
            texts: gives the texts by prompt; called in a thread, as it may have to parse.
            salts: of the prompts; see ``segments.owner_of``. Texts of further prompts are left out.
        """
        if self.tokenizer is None:
            return {}
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, _encoded, self.tokenizer.segmenter, texts, salts)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __repr__(self) -> str:
        return f"TokenizerService({self.status}, {self.trust}, {self.cache})"


def _encoded(
    segmenter: Segmenter,
    texts: Callable[[], Mapping[int, str]],
    salts: Sequence[str | None],
    most_new: int | None = None,
) -> dict[int, bytes]:
    return {
        index: segmenter.encode(text, most_new, salts[index])
        for index, text in texts().items()
        if index < len(salts)
    }


def _size(prompt: PromptInput) -> int:
    """About how many characters there are to look at."""
    if prompt.text is not None:
        return len(prompt.text)
    if prompt.pair is not None:
        return len(prompt.pair.query) + len(prompt.pair.document)
    if prompt.chat is None:
        return 0
    messages = prompt.chat.payload.get("messages")
    tools = LARGE if prompt.chat.payload.get("tools") else 0
    return tools + sum(
        len(content) if isinstance(content := message.get("content"), str) else LARGE
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict)
    )


def _from_ids(prompt: PromptInput) -> Encoded:
    key = encode_tokens(prompt.ids if prompt.ids is not None else [])
    return Encoded(("tokens", *prompt.namespace), key, len(key) // TOKEN_BYTES)
