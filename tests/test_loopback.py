"""Which hosts only this machine can reach: what may listen without a key hangs on it."""

from __future__ import annotations

import pytest

from sglang_ext.cluster_key import is_loopback


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.1", "::1", "[::1]"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "127.example.org", "127.0.0.1.nip.io"])
def test_reachable_by_others(host: str) -> None:
    """A name may begin with the digits of loopback."""
    assert not is_loopback(host)
