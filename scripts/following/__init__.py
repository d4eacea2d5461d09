"""What to read and to record when a new version of SGLang is followed; see docs/following-sglang.md."""
