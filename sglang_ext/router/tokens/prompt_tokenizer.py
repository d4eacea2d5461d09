"""The tokenizer of one model: the tokens that its server would make of a prompt or a conversation."""

from __future__ import annotations

import bisect
import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

from sglang_ext.errors import UserError
from sglang_ext.keys import TOKEN_BYTES, decode_tokens, encode_tokens
from sglang_ext.router.api.job import Chat, Pair
from sglang_ext.router.api.validation import Json
from sglang_ext.router.fleet.facts import InstanceFacts
from sglang_ext.router.tokens.answers import KeptAnswer, Turn, kept_answer, with_answer
from sglang_ext.router.tokens.chat_template import (
    CannotRender,
    Rendering,
    TemplateFailed,
    content_format,
    first_picture,
    prepare,
    reranking,
    shows_system_in_place,
    unsupported,
)
from sglang_ext.router.tokens.reasoning import shown
from sglang_ext.router.tokens.segments import Segmenter, TokenCache

logger = logging.getLogger("router.tokenizing")

_IMPORTING = threading.Lock()


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
        template = _template(tokenizer, facts)
        self.by_server_only = unsupported(facts.chat, facts.model.architecture, template)
        """Why conversations cannot be rendered here; ``None`` if they can."""
        if template is None and self.by_server_only is None:
            self.by_server_only = "the model has no chat template"
        if template is not None:
            tokenizer.chat_template = template
        self._plainly = None if template is None else _plain_rendering(tokenizer, template)
        self._format = content_format(template) if template is not None else "string"
        self.shows_in_place = template is not None and shows_system_in_place(template)
        """Whether the model sees system messages in the midst of a conversation."""
        encode, special, vocabulary = _backend(tokenizer)
        self.segmenter = Segmenter(encode, special, vocabulary, cache)
        bare, whole = encode(["a"])[0], tokenizer(["a"])["input_ids"][0]
        self._before, self._after = _wrapping(list(bare), list(whole))
        if facts.chat.multimodal and (self._before or self._after) and self.by_server_only is None:
            self.by_server_only = "the server puts special tokens around what its template makes"
        self._around_pair = _around_pair(tokenizer, encode)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._ends = {index: token.content for index, token in added.items() if token.special}
        """Tokens that may end an answer, and are no part of its text."""
        self.sends_ids = not facts.chat.multimodal
        """Whether the server takes a conversation as token ids as it takes its text."""
        self._reranks = None if template is None else reranking(template)

    def encode_text(
        self, text: str, most_new: int | None = None, salt: str | None = None, most: int | None = None
    ) -> bytes:
        """The tokens of a prompt as ``/generate`` and ``/v1/completions`` take it, special tokens added.

        Args:
            most_new, salt, most: see ``Segmenter.encode``, also for the errors.
        """
        return self._before + self.segmenter.encode(text, most_new, salt, most) + self._after

    def encode_pair(
        self, pair: Pair, most_new: int | None = None, salt: str | None = None, most: int | None = None
    ) -> bytes:
        """The tokens of a query and a document, as ``/v1/rerank`` puts them together.

        Args:
            most_new, salt, most: see ``Segmenter.encode``, for each.

        Raises:
            TemplateFailed: the template cannot be rendered with them.
            CannotRender: the server shows them to the model in a way that is not known here.
        """
        if pair.by_template and self._reranks is not None:
            return self.encode_text(self._reranks(pair), most_new, salt, most)
        if self._around_pair is None:
            raise CannotRender("the tokenizer puts two texts together in a way of its own")
        before, between, after = self._around_pair
        query = self.segmenter.encode(pair.query, most_new, salt, most)
        return before + query + between + self.segmenter.encode(pair.document, most_new, salt, most) + after

    def encode_chat(
        self,
        chat: Chat,
        *,
        answer_follows: bool = True,
        most_new: int | None = None,
        salt: str | None = None,
        most: int | None = None,
    ) -> bytes:
        """The tokens of a conversation.

        Args:
            answer_follows: append the generation prompt. Without it, the tokens are a prefix of a longer
                conversation.
            most_new, salt, most: see ``Segmenter.encode``.

        Raises:
            TemplateFailed: the template cannot be rendered with this conversation and these arguments.
            CannotRender: they cannot be known here.
        """
        if self.by_server_only is not None:
            raise CannotRender(self.by_server_only)
        rendering, text = self._rendered(self._seen(chat, salt), answer_follows)
        key = self.segmenter.encode(text, most_new, salt, most)
        if rendering.assistant_prefix is not None:
            prefix = self.encode_text(rendering.assistant_prefix, salt=salt, most=most)
            bos = self._tokenizer.bos_token_id
            if bos is not None and prefix.startswith(encode_tokens([bos])):
                prefix = prefix[TOKEN_BYTES:]
            key += prefix
        return key

    def encode_beginning(
        self, chat: Chat, most_new: int | None = None, salt: str | None = None, most: int | None = None
    ) -> tuple[bytes, list[Json]] | None:
        """The tokens of a conversation before its first picture, and the messages from there on; None for a
        conversation without pictures.

        Args:
            most_new, salt, most: see ``Segmenter.encode``.

        Raises:
            TemplateFailed, CannotRender: as ``encode_chat``.
        """
        payload = self._seen(chat, salt)
        if self.by_server_only is not None or (found := first_picture(payload)) is None:
            return None
        number, *both = found
        one, other = (self._rendered(each, answer_follows=True)[1] for each in both)
        key = self.segmenter.encode(_common_beginning(one, other), most_new, salt, most)
        return key, payload["messages"][number:]

    def turn(
        self,
        chat: Chat,
        key: bytes,
        kept: Sequence[KeptAnswer],
        salt: str | None,
        most: int,
        most_new: int | None = None,
    ) -> Turn:
        """A conversation of a session, with the tokens of its last answer where these are known.

        Args:
            key: its tokens, as ``encode_chat`` has them.
            kept: the session's last answers.
            most_new, salt, most: see ``Segmenter.encode``.

        Raises:
            TemplateFailed, CannotRender: as ``encode_chat``; or the answer goes on where the conversation
                ends.
        """
        rendering, text = self._rendered(self._seen(chat, salt), answer_follows=True)
        if rendering.assistant_prefix is not None:
            raise CannotRender("its last answer goes on")
        ends = tuple(self._ends.values())
        return with_answer(
            text, key, kept, ends, lambda part: self.segmenter.encode(part, most_new, salt, most)
        )

    def kept_answer(self, turn: Turn, answer: bytes) -> KeptAnswer | None:
        """See ``answers.kept_answer``. answer: as it was generated."""
        if answer and int(decode_tokens(answer[-TOKEN_BYTES:])[0]) in self._ends:
            answer = answer[:-TOKEN_BYTES]
        return kept_answer(turn, answer, self._exact)

    def _exact(self, key: bytes) -> str:
        text: str = self._tokenizer.decode(
            decode_tokens(key).tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def decode(self, key: bytes) -> str:
        """The text of token ids, special tokens included."""
        text: str = self._tokenizer.decode(decode_tokens(key).tolist())
        return text

    def _seen(self, chat: Chat, salt: str | None) -> Json:
        payload = chat.seen(self.shows_in_place and (chat.long_in_place or self._chat.system_in_place))
        # A tenant's message goes to the server as a chat, whose template gets the reasoning itself.
        return shown(payload, self._chat.reasoning_parser) if chat.by_parser and salt is None else payload

    def _rendered(self, payload: Json, answer_follows: bool) -> tuple[Rendering, str]:
        """Arguments of the template, and its text."""
        rendering = prepare(payload, self._chat, self._format, answer_follows=answer_follows)
        messages, tools, kwargs = rendering.messages, rendering.tools, rendering.kwargs
        try:
            return rendering, self._render(messages, tools, kwargs, answer_follows)
        except Exception as first:  # noqa: BLE001 - templates are programs, and fail in any way
            # As SGLang does: some templates take functions without OpenAI's wrapper.
            flat = None if tools is None else [tool["function"] for tool in tools]
            try:
                return rendering, self._render(messages, flat, kwargs, answer_follows)
            except Exception as second:  # noqa: BLE001
                why = f"the chat template failed: {type(second).__name__}: {second}"
                raise TemplateFailed(why) from first

    def _render(
        self, messages: list[Json], tools: list[Json] | None, kwargs: Json, answer_follows: bool
    ) -> str:
        if not kwargs and self._plainly is not None:
            return self._plainly(messages, tools, answer_follows)
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

    ``tokenizer.json`` is used as written, without the model's own code. SGLang also restores this form where
    transformers 5 would build a different tokenizer for the model's class. Only models without that file are
    loaded by ``AutoTokenizer``.

    Raises:
        UserError: there is no tokenizer; includes the error of transformers.
    """
    hint = "Give a folder with tokenizer.json that this machine can read"
    if os.path.isabs(path) and not os.path.isdir(path):
        raise UserError(f"there is no folder {path!r}", field="--tokenizer-path", hint=hint)
    # Imported here because it takes seconds, and imports torch if that is installed; by one thread at a time,
    # since a module lacks names while another thread is importing it.
    with _IMPORTING:
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


def _common_beginning(one: str, other: str) -> str:
    lengths = range(1, min(len(one), len(other)) + 1)
    return one[: bisect.bisect_left(lengths, True, key=lambda length: one[:length] != other[:length])]


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


def _plain_rendering(
    tokenizer: Any, template: str
) -> Callable[[list[Json], list[Json] | None, bool], str] | None:
    """A faster ``apply_chat_template`` for conversations without settings of their own: it skips the work
    that is the same for each call. None for a tokenizer with its own ``apply_chat_template``."""
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template

    kind = type(tokenizer)
    if getattr(kind, "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template:
        return None
    special = dict(tokenizer.special_tokens_map)

    def render(messages: list[Json], tools: list[Json] | None, answer_follows: bool) -> str:
        (rendered,), _ = render_jinja_template(
            [messages], tools, chat_template=template, add_generation_prompt=answer_follows, **special
        )
        return str(rendered)

    return render


def _backend(
    tokenizer: Any,
) -> tuple[Callable[[Sequence[str]], Sequence[Sequence[int]]], list[str], Collection[str]]:
    """(tokenize without adding special tokens, the tokens at which the input is cut, all entries)."""
    if not getattr(tokenizer, "is_fast", False):
        return lambda texts: [tokenizer.encode(text, add_special_tokens=False) for text in texts], [], ()
    backend = tokenizer.backend_tokenizer
    # To set either fails while another thread tokenizes with this backend.
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    special = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if not (token.normalized or token.lstrip or token.rstrip or token.single_word) and token.content
    ]
    return encode, special, backend.get_vocab(with_added_tokens=True)


def _around_pair(
    tokenizer: Any, encode: Callable[[Sequence[str]], Sequence[Sequence[int]]]
) -> tuple[bytes, bytes, bytes] | None:
    """The special tokens before, between and after two texts; None where a tokenizer does otherwise."""
    first, second = map(list, encode(["a", "b"]))
    try:
        whole = list(tokenizer([["a", "b"]])["input_ids"][0])
    except (TypeError, ValueError):
        return None  # one of Python, which takes no pairs in this form
    if len(first) != 1 or len(second) != 1 or whole.count(first[0]) != 1 or whole.count(second[0]) != 1:
        return None
    start, end = whole.index(first[0]), whole.index(second[0])
    if start > end:
        return None
    return (
        encode_tokens(whole[:start]),
        encode_tokens(whole[start + 1 : end]),
        encode_tokens(whole[end + 1 :]),
    )


def _wrapping(bare: list[int], whole: list[int]) -> tuple[bytes, bytes]:
    """The special tokens put before and after a text."""
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return encode_tokens(whole[:start]), encode_tokens(whole[start + len(bare) :])
    return b"", b""
