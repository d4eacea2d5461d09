"""From prompts to their keys in the prompt trees.

Rendering and tokenizing take milliseconds for long prompts, so they run in a pool of threads, with a
cache of tokenized segments (``segments``). The tokenizer comes from the path that the workers
report. Before its tokens are trusted, they are compared with a worker's own (``/v1/tokenize``) on a few
prompts and conversations.

A prompt without trusted tokens is matched by its text instead, in units of 4 bytes: this finds the
instance with the same beginning, but not the length in tokens. A conversation with pictures is matched by
tokens up to the first of them, and by its text, with digests of the pictures, from there on.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from sglang_ext.errors import UserError
from sglang_ext.keys import TOKEN_BYTES, decode_tokens, encode_tokens
from sglang_ext.router.api.job import Chat, Job, PromptInput
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.validation import Json
from sglang_ext.router.fleet.facts import InstanceFacts
from sglang_ext.router.http.types import RequestRefused
from sglang_ext.router.index.prompt_trees import BEGINNING
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.tenancy.budgets import Budget
from sglang_ext.router.tokens.answers import KeptAnswer, Turn
from sglang_ext.router.tokens.chat_template import CannotRender, TemplateFailed, text_of, text_of_messages
from sglang_ext.router.tokens.encoded import Encoded
from sglang_ext.router.tokens.fair_pool import FairPool
from sglang_ext.router.tokens.prompt_tokenizer import PromptTokenizer, load_tokenizer
from sglang_ext.router.tokens.segments import LONGEST, Segmenter, TextTooLong, TokenCache, TooMuchNew
from sglang_ext.router.tokens.tokenizer_check import ServerTokenizer, Trust, compare
from sglang_ext.signals import Signal

logger = logging.getLogger("router.tokenizing")

T = TypeVar("T")

_OWN = "the router itself"
"""Owner of the router's own work."""
INLINE_BYTES = 1 << 16
"""Prompts up to this length are rendered and looked up on the event loop, if no more than ``INLINE_NEW``
characters of them have to be tokenized: a thread and back takes longer than that."""
INLINE_NEW = 512
MOST_THREADS = 8
LARGE_ANSWER = 16_384
"""Bytes of an answer from which it is not parsed on the event loop."""
LARGE = 8192
"""Assumed length of input that is not plain text."""
CUT_CHARACTERS = 1 << 20
"""Characters allowed at any context length for a text that the server truncates."""
BATCH = 1 << 16
"""Characters of a request's prompts that are tokenized together, before another client has its turn."""


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
        self.pool = FairPool(threads or default_threads(), "router-tokenizer")
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
        """Whether the model's template renders system messages in the middle of a conversation."""
        return self.tokenizer is not None and self.tokenizer.shows_in_place

    def measure(self, metrics: RouterMetrics) -> None:
        """Export the cache's hits as metrics, and count prompts that are matched by text."""
        untokenized = metrics.counter("untokenized_prompts")
        self.fell_back.subscribe(lambda why: untokenized.labels(why).inc())
        size = metrics.gauge("token_cache_bytes")
        hits = metrics.gauge("token_cache_hits")
        misses = metrics.gauge("token_cache_misses")

        def refresh() -> None:
            size.set(self.cache.size_bytes)
            hits.set(self.cache.hits)
            misses.set(self.cache.misses)

        metrics.refreshing.subscribe(refresh)

    async def load(self, facts: InstanceFacts) -> None:
        """Load the tokenizer of a model. Never raises for a tokenizer that cannot be loaded: prompts are then
        matched by text, and a log line reports it."""
        self.tokenizer = None
        self.trust = Trust()
        self.cache = TokenCache(self._cache_bytes)
        path = self._path or facts.tokenizer_path
        try:
            self.tokenizer = await self.pool.run(_OWN, 0, functools.partial(self._load, path, facts))
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

    @property
    def longest(self) -> int:
        """Characters of the longest token."""
        return LONGEST if self.tokenizer is None else self.tokenizer.segmenter.longest

    def most_characters(self, limits: Limits) -> int:
        """How many characters a text may have; one with more cannot have so few tokens as a prompt may."""
        return _most(limits, self.longest) * self.longest

    async def encode(
        self,
        job: Job,
        *,
        completion_template: bool = False,
        answer_follows: bool = True,
        limits: Limits | None = None,
        budget: Budget | None = None,
        field: Callable[[int], str | None] = lambda index: None,
    ) -> list[Encoded]:
        """The keys of all prompts of a job.

        Args:
            completion_template: the server rewrites the prompts of ``/v1/completions``.
            answer_follows: see ``PromptTokenizer.encode_chat``.
            limits: of the model. A prompt that is far too long is refused before it is tokenized to its end;
                others that are too long are for the caller to refuse.
            budget: pays for the time that it takes.
            field: the name of the field that has a prompt, for people.

        Raises:
            RequestRefused: 400: a prompt is far too long; 429: the budget is used up.
        """
        prompts = job.prompts
        encode = functools.partial(
            self.encode_all,
            completion_template=completion_template,
            answer_follows=answer_follows,
            limits=limits,
        )
        try:
            sizes = list(map(_size, prompts))
            if sum(sizes) <= INLINE_BYTES:
                try:
                    return encode(prompts, most_new=INLINE_NEW)
                except TooMuchNew:
                    pass  # then in a thread
            found: list[Encoded] = []
            while len(found) < len(prompts):
                end, size = len(found), 0
                while end < len(prompts) and (end == len(found) or size + sizes[end] <= BATCH):
                    size += sizes[end]
                    end += 1
                found += await self._run(budget, size, functools.partial(encode, prompts[len(found) : end]))
            return found
        except PromptTooLong as long:
            index = next(index for index, prompt in enumerate(prompts) if prompt is long.prompt)
            raise _too_long(str(long), 0 if limits is None else limits.context_length, field(index)) from None

    async def check_text(
        self, text: str, salt: str | None, limits: Limits, budget: Budget | None, field: str
    ) -> None:
        """Refuse a text that is too long, before it is sent to a server. For texts that are no prompts.

        Args:
            salt: of the client's tenant.
            limits, budget: see ``encode``.
            field: name of the field with the text, for the error.

        Raises:
            RequestRefused: as ``encode``.
        """
        job = Job(False, (PromptInput(text=text, namespace=(None, None, salt)),))
        encoded = await self.encode(job, limits=limits, budget=budget, field=lambda index: field)
        tokens = encoded[0].tokens
        if tokens is not None and tokens > limits.context_length and not limits.truncates:
            raise _too_long(f"{tokens} tokens", limits.context_length, field)

    async def _run(self, budget: Budget | None, size: int, call: Callable[[], T]) -> T:
        """Call something in a thread, at the cost of a budget."""
        if budget is None:
            return await self.pool.run(_OWN, size, call)
        budget.check_tokenizing()
        return await self.pool.run(budget.owner, size, call, budget.tokenized)

    async def verify(self, theirs: ServerTokenizer) -> None:
        """Compare with a worker's own tokens, and trust the kinds of prompts without a difference.

        Args:
            theirs: asks the worker for its tokens; its exceptions propagate.
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
            key = await self.pool.run(_OWN, 0, encode)
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
        limits: Limits | None = None,
    ) -> list[Encoded]:
        """``encode`` in the calling thread.

        Args:
            most_new: see ``Segmenter.encode``, for each prompt.

        Raises:
            TooMuchNew: one of them has more.
            PromptTooLong: one of them is far too long.
        """
        most = None if limits is None else _most(limits, self.longest)
        found = []
        for prompt in prompts:
            try:
                encoded = self._encode_one(prompt, completion_template, answer_follows, most_new, most)
            except TextTooLong as long:
                raise PromptTooLong(prompt, f"{long.characters} characters") from long
            if most is not None and limits is not None and not limits.truncates:
                _check_units(prompt, encoded, most, self.longest)
            found.append(encoded)
        return found

    def _encode_one(
        self,
        prompt: PromptInput,
        completion_template: bool,
        answer_follows: bool,
        most_new: int | None,
        most: int | None,
    ) -> Encoded:
        if prompt.ids is not None and not prompt.media:
            return _from_ids(prompt)
        tokenizer = self.tokenizer
        fallback = self._cannot(prompt, completion_template)
        if fallback is None and tokenizer is not None:
            try:
                if prompt.chat is not None:
                    begins = tokenizer.encode_beginning(prompt.chat, most_new, prompt.salt, most)
                    if begins is not None:
                        self.fell_back(Fallback.OPAQUE)
                        return _with_pictures(prompt.namespace, *begins)
                    key = tokenizer.encode_chat(
                        prompt.chat,
                        answer_follows=answer_follows,
                        most_new=most_new,
                        salt=prompt.salt,
                        most=most,
                    )
                elif prompt.pair is not None:
                    key = tokenizer.encode_pair(prompt.pair, most_new, prompt.salt, most)
                else:
                    key = tokenizer.encode_text(prompt.text or "", most_new, prompt.salt, most)
                return Encoded(("tokens", *prompt.namespace), key, len(key) // TOKEN_BYTES)
            except TemplateFailed as failed:
                chat = prompt.chat
                if chat is not None and chat.payload.get("chat_template_kwargs") and not chat.by_parser:
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
        self,
        texts: Callable[[], Mapping[int, str]],
        salts: Sequence[str | None],
        budget: Budget | None = None,
    ) -> dict[int, bytes]:
        """The tokens of generated texts, to be put behind the tokens of their prompts.

        The last token of a prompt and the first of an answer are taken not to merge, which chat templates
        see to; where they would, a little of the next turn's prefix is not foreseen.

        Args:
            texts: gives the texts by prompt; called in a thread, as it may have to parse.
            salts: of the prompts; see ``segments.owner_of``. Texts of further prompts are left out.
            budget: pays for the time that it takes.
        """
        if self.tokenizer is None:
            return {}
        encode = functools.partial(_encoded, self.tokenizer.segmenter, texts, salts)
        if budget is None:
            return await self.pool.run(_OWN, LARGE_ANSWER, encode)
        return await self.pool.run(budget.owner, LARGE_ANSWER, encode, budget.tokenized)

    @property
    def sends_ids(self) -> bool:
        """Whether conversations may go to servers as token ids."""
        return self.tokenizer is not None and self.tokenizer.sends_ids

    async def turn(
        self,
        prompt: PromptInput,
        key: bytes,
        kept: Sequence[KeptAnswer],
        limits: Limits,
        budget: Budget | None,
    ) -> Turn | None:
        """``PromptTokenizer.turn`` of a prompt; None where it is not rendered here.

        Args:
            key: its tokens.
            kept: the last answers of its session.
            limits, budget: see ``encode``, also for the error.
        """
        tokenizer, chat = self.tokenizer, prompt.chat
        if tokenizer is None or chat is None:
            return None
        most = _most(limits, self.longest)
        turn = functools.partial(tokenizer.turn, chat, key, kept, prompt.salt, most)
        size = _size(prompt)
        try:
            if size <= INLINE_BYTES:
                with contextlib.suppress(TooMuchNew):
                    return turn(INLINE_NEW)
            return await self._run(budget, size, turn)
        except (CannotRender, TextTooLong):
            return None

    def kept_answer(self, turn: Turn, answer: bytes) -> KeptAnswer | None:
        """The answer to a turn, for the next ones; None if it is no text."""
        return None if self.tokenizer is None else self.tokenizer.kept_answer(turn, answer)

    def decode(self, key: bytes) -> str:
        """The text of a few tokens; empty without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(key)

    def close(self) -> None:
        """End the threads."""
        self.pool.close()

    def __repr__(self) -> str:
        return f"TokenizerService({self.status}, {self.trust}, {self.cache})"


class PromptTooLong(Exception):
    """A prompt with far more tokens than the model's context."""

    def __init__(self, prompt: PromptInput, size: str) -> None:
        super().__init__(size)
        self.prompt = prompt


def _too_long(size: str, context: int, field: str | None) -> RequestRefused:
    return RequestRefused(
        f"The input ({size}) is longer than the model's context length ({context} tokens).",
        param=field,
        code="context_length_exceeded",
    )


def default_threads() -> int:
    """Of the pool: one for each core, within bounds."""
    return min(max(2, len(os.sched_getaffinity(0))), MOST_THREADS)


def _most(limits: Limits, longest: int) -> int:
    """Tokens up to which a text is tokenized, at least."""
    most = max(1, limits.context_length)
    return max(most, -(-CUT_CHARACTERS // longest)) if limits.truncates else most


def _check_units(prompt: PromptInput, encoded: Encoded, most: int, longest: int) -> None:
    """Refuse a prompt that was not tokenized to its end, or is matched by a text that is far too long."""
    if encoded.tokens is None:
        if prompt.ids is None and len(encoded.key) > 4 * most * longest:
            raise PromptTooLong(prompt, f"{len(encoded.key)} bytes of text")
    elif prompt.ids is None and encoded.tokens > 2 * most:
        raise PromptTooLong(prompt, f"more than {2 * most} tokens")


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


def _with_pictures(namespace: tuple[str | None, ...], key: bytes, messages: list[Json]) -> Encoded:
    """A conversation with the tokens ``key`` before its first picture, which is in the first message."""
    text = text_of_messages(messages)
    whole = key + text[: len(text) // TOKEN_BYTES * TOKEN_BYTES]
    return Encoded((BEGINNING, *namespace), whole, None, len(key) // TOKEN_BYTES)


def _from_ids(prompt: PromptInput) -> Encoded:
    key = encode_tokens(prompt.ids if prompt.ids is not None else [])
    return Encoded(("tokens", *prompt.namespace), key, len(key) // TOKEN_BYTES)
