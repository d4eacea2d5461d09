"""Requirements to read and state to record when the project follows a new version of SGLang; see
docs/following-sglang.md.
"""
