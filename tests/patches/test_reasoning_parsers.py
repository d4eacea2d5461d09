"""The reasoning parsers whose tags the router knows are those of SGLang."""

from __future__ import annotations

from sglang.srt.parser.reasoning_parser import ReasoningParser

from sglang_ext.router.tokens.reasoning import TAGGED


def test_the_parsers_of_the_table_have_these_tags() -> None:
    for name in TAGGED:
        detector = ReasoningParser.DetectorMap[name]()
        tags = detector.think_start_token, detector.think_start_self_label, detector.think_end_token
        assert tags == ("<think>", "", "</think>"), name
