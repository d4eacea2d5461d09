"""Float32 values that one inverted bit makes huge: damage that an answer shows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WITHIN = 1024
"""Values among which one is looked for."""


def make_last_huge(values: npt.NDArray[np.float32]) -> int:
    """Invert the highest bit of the exponent of the last value that becomes huge by it; return its index.

    The bit makes a value from 2 on small, and one from 1 to 2 infinite or no number: the answer then need not
    change, or the server may refuse it. Zeros are not damaged, because padding is zero.
    """
    last = values[-WITHIN:]
    small = np.flatnonzero((last != 0) & (np.abs(last) < 1))
    assert small.size, "no value becomes huge"
    index = values.size - last.size + int(small[-1])
    values.view(np.uint32)[index] ^= 1 << 30
    return index
