"""Changes to SGLang at run time: one module per change.

Each module says what it changes, why no extension point of SGLang serves, for which version, and when it can
go; its ``PATCH`` declares the functions it relies on with their signatures and source hashes.
``python -m sglang_ext.patches`` lists them with their state. See :mod:`sglang_ext.patches.base`.
"""
