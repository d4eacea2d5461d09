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
from typing import Any

import msgspec

from router.chat_template import CannotRender, content_format, prepare, text_of, unsupported
from router.facts import InstanceFacts
from router.segments import Segmenter, TokenCache, TooMuchNew
from router.trial import Theirs, Trust, compare
from router.validation import Job, Json, PromptInput
from sglang_ext.errors import UserError
from sglang_ext.keys import TOKEN_BYTES, decode_tokens, encode_tokens

logger = logging.getLogger("router.tokenizing")


INLINE_BYTES = 1 << 16
"""Prompts up to this length are rendered and looked up on the event loop, if no more than ``INLINE_NEW``
characters of them have to be tokenized: a thread and back takes longer than that."""
INLINE_NEW = 512
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


class Encoded(msgspec.Struct, frozen=True):
    """A prompt as the trees know it."""

    namespace: tuple[str | None, ...]
    key: bytes
    tokens: int | None
    """Its length; ``None`` when ``key`` is text."""

    @property
    def units(self) -> int:
        """Length in the unit of matches: tokens, or 4 bytes of text."""
        return len(self.key) // TOKEN_BYTES


class PromptTokenizer:
    """The tokenizer of one model. Blocking; for many threads.

    Args:
        tokenizer: of transformers.
        facts: of the model and the server's settings.
        cache: for tokens of segments.
    """

    def __init__(self, tokenizer: Any, facts: InstanceFacts, cache: TokenCache) -> None:
        self._tokenizer = tokenizer
        self._chat = facts.chat
        self.by_server_only = unsupported(facts.chat, facts.model.architecture)
        """Why conversations cannot be rendered here; ``None`` if they can."""
        template = _template(tokenizer, facts)
        if template is None and self.by_server_only is None:
            self.by_server_only = "the model has no chat template"
        if template is not None:
            tokenizer.chat_template = template
        self._format = content_format(template) if template is not None else "string"
        encode, special = _backend(tokenizer)
        self.segmenter = Segmenter(encode, special, cache)
        bare, whole = encode(["a"])[0], tokenizer(["a"])["input_ids"][0]
        self._before, self._after = _wrapping(list(bare), list(whole))

    def encode_text(self, text: str, most_new: int | None = None) -> bytes:
        """The tokens of a prompt as ``/generate`` and ``/v1/completions`` take it, special tokens added.

        Args:
            most_new: see ``Segmenter.encode``.
        """
        return self._before + self.segmenter.encode(text, most_new) + self._after

    def encode_chat(
        self, payload: Json, *, answer_follows: bool = True, most_new: int | None = None
    ) -> bytes:
        """The tokens of a conversation.

        Args:
            answer_follows: they end with what makes the model answer. Without it they are how a longer
                conversation begins.
            most_new: see ``Segmenter.encode``.

        Raises:
            CannotRender: they cannot be known here.
        """
        if self.by_server_only is not None:
            raise CannotRender(self.by_server_only)
        rendering = prepare(payload, self._chat, self._format, answer_follows=answer_follows)
        tools = rendering.tools
        try:
            text = self._render(rendering.messages, tools, rendering.kwargs, answer_follows)
        except Exception as first:  # noqa: BLE001 - templates are programs, and fail in any way
            # As SGLang does: some templates take functions without OpenAI's wrapper.
            flat = None if tools is None else [tool["function"] for tool in tools]
            try:
                text = self._render(rendering.messages, flat, rendering.kwargs, answer_follows)
            except Exception as second:  # noqa: BLE001
                raise CannotRender(f"the chat template failed: {second}") from first
        key = self.segmenter.encode(text, most_new)
        if rendering.assistant_prefix is not None:
            prefix = self.encode_text(rendering.assistant_prefix)
            bos = self._tokenizer.bos_token_id
            if bos is not None and prefix.startswith(encode_tokens([bos])):
                prefix = prefix[TOKEN_BYTES:]
            key += prefix
        return key

    def _render(
        self, messages: list[Json], tools: list[Json] | None, kwargs: Json, answer_follows: bool
    ) -> str:
        rendered: str = self._tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=answer_follows,
            tools=tools,
            return_dict=False,
            **kwargs,
        )
        return rendered


def load_tokenizer(path: str, *, trust_remote_code: bool) -> Any:
    """The tokenizer at ``path``, a folder or the name of a model.

    ``tokenizer.json`` is taken as it is written, which needs nothing of the model's own code. It is also
    what SGLang restores where transformers 5 would build something else for the model's class. Only
    models without that file are left to ``AutoTokenizer``.

    Raises:
        UserError: there is none, with what transformers says.
    """
    hint = "Give a folder with tokenizer.json that this machine can read"
    if os.path.isabs(path) and not os.path.isdir(path):
        raise UserError(f"there is no folder {path!r}", field="--tokenizer-path", hint=hint)
    # Imported here because it takes seconds, and brings torch along where that is installed.
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(path, clean_up_tokenization_spaces=False)
    except Exception as first:  # noqa: BLE001 - anything that a tokenizer's files may bring about
        try:
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(
                path, trust_remote_code=trust_remote_code, clean_up_tokenization_spaces=False
            )
        except Exception as second:
            raise UserError(
                f"no tokenizer can be loaded from {path!r}: {first}; {second}",
                field="--tokenizer-path",
                hint=hint,
            ) from second


def _template(tokenizer: Any, facts: InstanceFacts) -> str | None:
    """The Jinja template that SGLang would use."""
    if facts.chat.chat_template is not None and facts.chat.chat_template.endswith(".jinja"):
        try:
            with open(facts.chat.chat_template, encoding="utf-8") as file:
                return file.read().strip("\n").replace("\\n", "\n")
        except OSError as error:
            logger.warning("cannot read the workers' chat template: %s", error)
            return None
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        name = facts.chat.hf_chat_template_name or next(iter(template), None)
        template = template.get(name)
    return template if isinstance(template, str) else None


def _backend(tokenizer: Any) -> tuple[Callable[[Sequence[str]], Sequence[Sequence[int]]], list[str]]:
    """(tokenize without adding special tokens, the tokens at which the input is cut)."""
    if not getattr(tokenizer, "is_fast", False):
        return lambda texts: [tokenizer.encode(text, add_special_tokens=False) for text in texts], []
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    special = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if not (token.normalized or token.lstrip or token.rstrip or token.single_word) and token.content
    ]
    return encode, special


def _wrapping(bare: list[int], whole: list[int]) -> tuple[bytes, bytes]:
    """The special tokens put before and after a text."""
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return encode_tokens(whole[:start]), encode_tokens(whole[start + len(bare) :])
    return b"", b""


class TokenizerService:
    """Encodes jobs off the event loop, as well as the state of affairs allows.

    Args:
        threads: size of the pool.
        cache_bytes: memory for tokens of segments.
        path: where the tokenizer is, instead of the path that the workers report.
        on_fallback: called in any thread for every prompt that is matched by its text.
    """

    def __init__(
        self,
        *,
        threads: int,
        cache_bytes: int,
        path: str | None = None,
        trust_remote_code: bool = False,
        on_fallback: Callable[[Fallback], None] = lambda why: None,
    ) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="router-tokenizer")
        self._path = path
        self._trust_remote_code = trust_remote_code
        self._on_fallback = on_fallback
        self._cache_bytes = cache_bytes
        self.cache = TokenCache(cache_bytes)
        self.tokenizer: PromptTokenizer | None = None
        self.trust = Trust()
        self.status = "no model yet"
        """Whether prompts are tokenized, and if not, why, for people."""

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
            "segment" if self.tokenizer.segmenter.by_segment else "whole prompt",
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
        if all(prompt.ids is not None for prompt in prompts):
            return [_from_ids(prompt) for prompt in prompts]
        if sum(map(_size, prompts)) <= INLINE_BYTES:
            with contextlib.suppress(TooMuchNew):
                return self.encode_all(prompts, completion_template, answer_follows, INLINE_NEW)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._pool, self.encode_all, prompts, completion_template, answer_follows
        )

    async def verify(self, theirs: Theirs) -> None:
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
            encode = functools.partial(tokenizer.encode_chat, body)
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
        if prompt.ids is not None:
            return _from_ids(prompt)
        tokenizer = self.tokenizer
        fallback = self._cannot(prompt, completion_template)
        if fallback is None and tokenizer is not None:
            try:
                if prompt.chat is not None:
                    key = tokenizer.encode_chat(
                        prompt.chat.payload, answer_follows=answer_follows, most_new=most_new
                    )
                else:
                    key = tokenizer.encode_text(prompt.text or "", most_new)
                return Encoded(("tokens", *prompt.namespace), key, len(key) // TOKEN_BYTES)
            except CannotRender as error:
                logger.debug("matched by text: %s", error)
                fallback = Fallback.REQUEST
        self._on_fallback(fallback or Fallback.NO_TOKENIZER)
        text = prompt.text if prompt.chat is None else text_of(prompt.chat.payload)
        raw = (text or "").encode()
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
        self, texts: Callable[[], Mapping[int, str]], size: int
    ) -> dict[int, bytes] | None:
        """As ``continuations``, in the calling thread; ``None`` where that would take too long.

        Args:
            texts: as there.
            size: bytes of the answer that it looks at.
        """
        if self.tokenizer is None:
            return {}
        if size < LARGE_ANSWER:
            with contextlib.suppress(TooMuchNew):
                return _encoded(self.tokenizer.segmenter, texts, INLINE_NEW)
        return None

    async def continuations(self, texts: Callable[[], Mapping[int, str]]) -> dict[int, bytes]:
        """The tokens of generated texts, to be put behind the tokens of their prompts.

        The last token of a prompt and the first of an answer are taken not to merge, which chat templates
        see to; where they would, a little of the next turn's prefix is not foreseen.

        Args:
            texts: gives the texts by prompt; called in a thread, as it may have to parse.
        """
        if self.tokenizer is None:
            return {}
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, _encoded, self.tokenizer.segmenter, texts)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __repr__(self) -> str:
        return f"TokenizerService({self.status}, {self.trust}, {self.cache})"


def _encoded(
    segmenter: Segmenter, texts: Callable[[], Mapping[int, str]], most_new: int | None = None
) -> dict[int, bytes]:
    return {index: segmenter.encode(text, most_new) for index, text in texts().items()}


def _size(prompt: PromptInput) -> int:
    """About how many characters there are to look at."""
    if prompt.text is not None:
        return len(prompt.text)
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
