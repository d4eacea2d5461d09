"""A cluster of SGLang servers with its router on this machine: ``sglang-ext cluster``.

``config`` says what the user wants, ``plan`` makes processes of it, ``lifecycle`` decides what becomes of
each, ``supervisor`` acts, ``guard`` sees to it that nothing stays behind, ``terminal`` shows it.
"""
