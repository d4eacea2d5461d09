"""A cluster of SGLang servers with its router on this machine: ``sglang-ext cluster``.

``config`` holds the user's settings, ``plan`` turns them into processes, ``lifecycle`` decides the state of
each, ``supervisor`` acts, ``guard`` leaves nothing behind, ``terminal`` shows the state.
"""
