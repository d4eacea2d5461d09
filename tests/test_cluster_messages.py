"""Messages between members, and the key by which they recognise each other."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.cluster_key import LOOK_S, MAX_SKEW_S, ClusterKey, Replays, read_cluster_key, shared_with
from sglang_ext.errors import ConfigError, UserError
from sglang_ext.protocol.cluster import (
    MAX_BODY_BYTES,
    PROTOCOL,
    ChangeRole,
    Drain,
    Registration,
    decode,
    dp_rank_of,
    encode,
    instance_path,
    server_of,
    url_of_replica,
)
from sglang_ext.testing.fakes import FakeClock

GOOD: dict[str, Any] = {
    "url": "http://127.0.0.1:30001",
    "instance": "prefill-0",
    "epoch": "0" * 31 + "f",
    "role": "prefill",
    "agent": "tcp://127.0.0.1:40001",
    "agent_key": "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7",
    "block_size": 16,
    "model": "tiny",
    "tp_size": 2,
    "namespace": "n",
}
SECRET = b"correct horse battery staple, 32 characters"


def test_a_registration_survives_the_wire() -> None:
    registration = decode(msgspec.json.encode(GOOD), Registration)
    assert decode(encode(registration), Registration) == registration
    assert (registration.role, registration.tp_size, registration.protocol) == ("prefill", 2, PROTOCOL)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"url": "ftp://host:1"}, "http://host:port"),
        ({"url": "http://host:1?x=1"}, "more than host"),
        ({"url": "http://user@host:1"}, "more than host"),
        ({"url": "http://host:1#one"}, "more than host"),
        ({"url": "http://host:1#dp01"}, "more than host"),
        ({"url": "http://host:1/"}, "slash"),
        ({"url": "http://host:99999"}, "not a URL"),
        ({"url": "http://ho st:1"}, "characters"),
        ({"url": "http://h/" + "x" * 600}, "<= 512"),
        ({"instance": ""}, "instance"),
        ({"instance": "a/b"}, "instance"),
        ({"instance": "a" * 129}, "instance"),
        ({"epoch": "0" * 31}, "epoch"),
        ({"epoch": "F" * 32}, "epoch"),
        ({"role": "both"}, "role"),
        ({"agent": "ipc:///tmp/x"}, "tcp://host:port"),
        ({"agent": "tcp://host:70000"}, "tcp://host:port"),
        ({"agent_key": "short"}, "agent_key"),
        ({"block_size": 0}, "block_size"),
        ({"tp_size": 5000}, "tp_size"),
        ({"protocol": PROTOCOL + 1}, "run one release"),
        ({"protocol": PROTOCOL + 1, "newer": "field"}, f"protocol: {PROTOCOL + 1} is spoken there"),
        ({"color": "red"}, "color"),
        ({"url": 3}, "url"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match="Registration") as caught:
        decode(msgspec.json.encode(GOOD | change), Registration)
    assert words in str(caught.value)


def test_a_replica_is_told_by_its_url() -> None:
    url = url_of_replica("http://host:1", 11)
    assert decode(msgspec.json.encode(GOOD | {"url": url}), Registration).url == url
    assert (server_of(url), dp_rank_of(url)) == ("http://host:1", 11)
    assert (server_of("http://host:1"), dp_rank_of("http://host:1")) == ("http://host:1", None)


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[" * 5000, b'{"deadline_s": "' + b"x" * 70_000])
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(UserError):
        decode(body, Drain)


def test_limits_of_a_drain() -> None:
    assert decode(b"", Drain) == Drain()
    for wrong in (b'{"deadline_s": -1}', b'{"deadline_s": 1e9}', b'{"deadline_s": NaN}'):
        with pytest.raises(UserError):
            decode(wrong, Drain)
    with pytest.raises(UserError, match=str(MAX_BODY_BYTES)):
        decode(b" " * (MAX_BODY_BYTES + 1), Drain)


def test_paths() -> None:
    assert instance_path("a") == "/cluster/instances/a"
    assert instance_path("a", "drain") == "/cluster/instances/a/drain"


# -- the key ------------------------------------------------------------------------------------------


def signed(key: ClusterKey) -> str:
    return key.sign("POST", "/cluster/instances", b"body", 1000.0)


def test_a_signature_holds_for_one_request_and_some_time() -> None:
    key = ClusterKey(SECRET)
    ask = ("POST", "/cluster/instances", b"body")
    assert key.problem(signed(key), *ask, 1000.0) is None
    assert key.problem(signed(key), *ask, 1000.0 + MAX_SKEW_S - 1) is None
    assert "set the clocks right" in (key.problem(signed(key), *ask, 1000.0 + MAX_SKEW_S + 1) or "")
    assert "set the clocks right" in (key.problem(signed(key), *ask, 1000.0 - MAX_SKEW_S - 1) or "")
    others: tuple[tuple[str, str, bytes], ...] = (
        ("PUT", *ask[1:]),
        (ask[0], "/x", ask[2]),
        (*ask[:2], b"bodz"),
    )
    for other in others:
        assert "another cluster key" in (key.problem(signed(key), *other, 1000.0) or "")
    assert "another cluster key" in (ClusterKey(SECRET + b"x").problem(signed(key), *ask, 1000.0) or "")


@pytest.mark.parametrize(
    "header", ["", "Bearer x", "KV-HMAC", "KV-HMAC x.y", "KV-HMAC .", "KV-HMAC ².", "KV-HMAC 1.2.3"]
)
def test_what_is_no_signature_is_refused(header: str) -> None:
    assert "is not signed" in (ClusterKey(SECRET).problem(header, "GET", "/", b"", 0.0) or "")


def test_a_huge_moment_is_refused() -> None:
    key = ClusterKey(SECRET)
    forged = f"KV-HMAC {'9' * 5000}.{'0' * 32}.{'0' * 64}"
    assert key.problem(forged, "GET", "/", b"", 0.0)


def test_every_member_derives_the_same_curve_pair() -> None:
    public, secret = ClusterKey(SECRET).curve_pair()
    assert (public, secret) == ClusterKey(SECRET).curve_pair()
    assert len(public) == len(secret) == 40
    assert public == zmq.curve_public(secret)
    assert ClusterKey(SECRET + b"x").curve_pair() != (public, secret)
    assert SECRET.decode() not in repr(ClusterKey(SECRET))


def key_file(folder: Path, content: bytes = SECRET + b"\n", mode: int = 0o600) -> Path:
    path = folder / "cluster.key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_key_file_is_read(tmp_path: Path) -> None:
    assert read_cluster_key(key_file(tmp_path)) == ClusterKey(SECRET)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_key_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 600") as caught:
        read_cluster_key(key_file(tmp_path, mode=mode), field="--kv-cluster-key-file")
    assert caught.value.field == "--kv-cluster-key-file"


@pytest.mark.parametrize(
    ("mode", "owner", "group", "good"),
    [
        (0o440, 0, 2000, True),  # a Secret, mounted for a pod with fsGroup 2000
        (0o640, 0, 2000, True),
        (0o400, 0, 0, True),
        (0o600, 1000, 1000, True),
        (0o440, 0, 3000, False),  # a group that we are not in
        (0o440, 0, 0, False),
        (0o440, 1000, 2000, False),  # a file of our own can have a narrower mode
        (0o460, 0, 2000, False),
        (0o450, 0, 2000, False),
        (0o444, 0, 2000, False),
        (0o600, 1001, 1000, False),
    ],
)
def test_who_may_read_a_secret(mode: int, owner: int, group: int, good: bool) -> None:
    status = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, group, 10, 0, 0, 0))
    assert (shared_with(status, 1000, {1000, 2000, 0}) is None) is good


def test_a_secret_that_kubernetes_mounts_is_read_and_changed_as_it_does(tmp_path: Path) -> None:
    """A link to a file in a folder that a link names, which is put in place of the former at once."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    groups = os.getgroups()
    os.setgroups([*groups, 2000])
    try:
        for name, text in (("..1", SECRET), ("..2", OTHER)):
            (tmp_path / name).mkdir()
            file = key_file(tmp_path / name, text, 0o440)
            os.chown(file, 0, 2000)
        (tmp_path / "..data").symlink_to("..1")
        (tmp_path / "cluster.key").symlink_to("..data/cluster.key")
        now = 0.0
        key = read_cluster_key(tmp_path / "cluster.key", now=lambda: now)
        assert key == ClusterKey(SECRET)
        (tmp_path / "..data_tmp").symlink_to("..2")
        os.replace(tmp_path / "..data_tmp", tmp_path / "..data")
        now = 2.0
        assert key.curve_pair() == ClusterKey(OTHER).curve_pair()
        os.setgroups(groups)
        with pytest.raises(ConfigError, match="mode 0440"):
            read_cluster_key(tmp_path / "cluster.key")
    finally:
        os.setgroups(groups)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"x" * 64,
        b"\n".join([SECRET] * 3),
        SECRET + b"\nshort",
        os.urandom(5000).hex().encode(),
    ],
)
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError):
        read_cluster_key(key_file(tmp_path, content))


OTHER = b"another key of at least thirty-two characters"


def test_a_signature_is_good_once() -> None:
    key, replays = ClusterKey(SECRET), Replays()
    header = signed(key)
    assert signed(key) != header, "a nonce each"
    assert not replays.is_again(header, 1000.0)
    assert replays.is_again(header, 1000.0 + MAX_SKEW_S)
    assert replays.is_again(header.replace(" ", "   ").replace("KV", "kv"), 1001.0), "however it is written"
    assert not replays.is_again(signed(key), 1000.0)
    replays.is_again("KV-HMAC later", 1000.0 + 4 * MAX_SKEW_S)
    assert repr(replays) == "Replays(1)", "messages too old to be accepted are forgotten"


def test_a_member_tells_what_time_it_is_for_one_request_only() -> None:
    key, header = ClusterKey(SECRET), signed(ClusterKey(SECRET))
    told = key.clock(header, 1090.0)
    assert key.ahead(told, header, 1000.0) == 90.0
    assert key.ahead(told, header, 1180.0) == -90.0
    assert key.ahead(told, signed(key), 1000.0) is None, "of another request"
    assert key.ahead(told.replace("1090", "1091"), header, 1000.0) is None
    assert key.ahead(ClusterKey(OTHER).clock(header, 1090.0), header, 1000.0) is None
    assert key.ahead("", header, 1000.0) is key.ahead("1.x", header, 1000.0) is None
    assert key.clock("Bearer operator", 1090.0) == ""


def test_a_changed_nonce_is_no_other_signature() -> None:
    key = ClusterKey(SECRET)
    scheme, _, value = signed(key).partition(" ")
    moment, nonce, signature = value.split(".")
    changed = f"{scheme} {moment}.{nonce[::-1]}.{signature}"
    assert key.problem(changed, "POST", "/cluster/instances", b"body", 1000.0)


def test_a_seal_holds_for_one_record_in_one_place() -> None:
    key = ClusterKey(SECRET)
    seal = key.seal("a:member", b"data")
    assert key.is_sealed("a:member", b"data", seal)
    assert not key.is_sealed("b:member", b"data", seal)
    assert not key.is_sealed("a:member", b"datA", seal)
    assert not key.is_sealed("a:member", b"data", "-")
    assert not ClusterKey(OTHER).is_sealed("a:member", b"data", seal)


def test_keys_are_changed_while_members_run(tmp_path: Path) -> None:
    """Two members go from one key to another, one after the other, and never lose each other."""
    clock = FakeClock()
    files = [tmp_path / name for name in "ab"]
    for file in files:
        file.write_bytes(SECRET)
        file.chmod(0o600)
    members = [read_cluster_key(file, now=clock.monotonic) for file in files]
    old, new = SECRET + b"\n", OTHER + b"\n"
    for content in (old + new, new + old, new):
        for file in files:
            file.write_bytes(content)
            clock.advance(LOOK_S)
            for one, other in (members, members[::-1]):
                assert other.problem(signed(one), "POST", "/cluster/instances", b"body", 1000.0) is None
                assert other.is_member(one.curve_pair()[0])
                assert other.is_sealed("x", b"data", one.seal("x", b"data"))
    for member in members:
        assert member.problem(signed(ClusterKey(SECRET)), "POST", "/cluster/instances", b"body", 1000.0)
        assert not member.is_member(ClusterKey(SECRET).curve_pair()[0])


def test_a_file_that_went_wrong_leaves_the_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    file = key_file(tmp_path)
    key = read_cluster_key(file, now=clock.monotonic)
    for spoil in (lambda: file.write_bytes(b"short"), lambda: file.chmod(0o644), file.unlink):
        spoil()
        clock.advance(LOOK_S)
        assert key == ClusterKey(SECRET)
        assert key.problem(signed(ClusterKey(SECRET)), "POST", "/cluster/instances", b"body", 1000.0) is None
    assert len([record for record in caplog.records if "stays as it was" in record.message]) == 3


def test_no_file_and_no_regular_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="openssl rand"):
        read_cluster_key(tmp_path / "none")
    with pytest.raises(ConfigError, match="is not a file"):
        read_cluster_key(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="is not a file"):
        read_cluster_key(tmp_path / "pipe")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
@settings(deadline=None)
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    for kind in (Registration, Drain, ChangeRole):
        try:
            decode(data, kind)
        except UserError:
            continue


@given(change=st.dictionaries(st.sampled_from(sorted(GOOD)), JSON, min_size=1, max_size=3))
@settings(deadline=None)
def test_a_registration_with_anything_in_its_fields_holds_what_it_promises(change: dict[str, Any]) -> None:
    try:
        found = decode(json.dumps(GOOD | change).encode(), Registration)
    except UserError:
        return
    assert re.fullmatch(r"[0-9a-f]{32}", found.epoch)
    assert found.role in ("colocated", "prefill", "decode")
    assert found.url.startswith(("http://", "https://"))
    assert found.agent == "" or found.agent.startswith("tcp://")
    assert instance_path(found.instance).count("/") == 3
    assert found.agent_key == "" or len(found.agent_key) == 40
