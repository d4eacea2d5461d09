"""``sglang-ext cluster-status`` and ``sglang-ext drain``, against a router that is played."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from sglang_ext import cli
from sglang_ext.cluster import drain as drain_module
from sglang_ext.cluster.drain import NOT_FINISHED, is_over
from sglang_ext.cluster.status import NOBODY_SERVES, SOME_AWAITED, notes, show
from sglang_ext.cluster_key import read_cluster_key
from sglang_ext.protocol.cluster import (
    Cluster,
    Difference,
    Draining,
    Elsewhere,
    Incompatible,
    InstanceView,
    StoreView,
)


def view(name: str = "a", state: str = "ready", **more: Any) -> InstanceView:
    values = {"role": "colocated", "url": f"http://{name}:1", "why": "answers", "registered": True, **more}
    return InstanceView(instance=name, state=state, **values)


def cluster(*views: InstanceView, **more: Any) -> Cluster:
    values = {"router": "r1", "store": StoreView(kind="embedded"), "routers": ("r1",), **more}
    return Cluster(instances=views, **values)


class Router:
    """Answers with the given answers, in turn; repeats the last one."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = []
        self.asked: list[tuple[str, str, bytes, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                length = int(self.headers.get("content-length", 0))
                body = self.rfile.read(length)
                outer.asked.append((self.command, self.path, body, self.headers.get("authorization", "")))
                status, value = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                data = value if isinstance(value, bytes) else msgspec.json.encode(value)
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = _answer

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def router() -> Iterator[Router]:
    played = Router()
    thread = threading.Thread(target=played.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield played
    played.server.shutdown()
    thread.join()
    played.server.server_close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_module, "POLL_S", 0.0)
    monkeypatch.delenv("SGLANG_EXT_API_KEY", raising=False)


def test_the_status_as_json_and_as_a_table(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    router.answers = [(200, cluster(view("a", in_flight=3), view("b", "down", why="killed")))]
    assert cli.main(["cluster-status", "--router", router.url, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert [instance["instance"] for instance in value["instances"]] == ["a", "b"]
    assert cli.main(["cluster-status", "--router", router.url]) == 0
    text = capsys.readouterr().out
    for word in ("a", "ready", "3", "down", "b: killed", "http://a:1"):
        assert word in text


def test_a_cluster_that_cannot_serve_has_a_status_of_its_own(router: Router) -> None:
    router.answers = [(200, cluster(unusable="no instance has joined"))]
    assert cli.main(["cluster-status", "--router", router.url]) == NOBODY_SERVES


def test_a_cluster_whose_disks_are_not_known_is_not_ready(router: Router) -> None:
    statuses = []
    for awaited in (True, False):
        router.answers = [(200, cluster(view("a"), view("b", awaited=awaited)))]
        statuses.append(cli.main(["cluster-status", "--router", router.url]))
    assert statuses == [SOME_AWAITED, 0]


def test_instances_that_cannot_work_together_are_named() -> None:
    why = "b cannot share KV with a: rope_theta (2.0 at b, 1.0 at a)"
    found = Incompatible(
        what="sharing", instances=("b",), count=1, others=("a",), others_count=1, why=why,
        differences=(Difference("rope_theta", "2.0", "1.0"),),
    )  # fmt: skip
    assert why in notes(cluster(view(), view("b"), incompatible=(found,)))


def test_what_the_table_does_not_say() -> None:
    lines = notes(
        cluster(
            view("a", "draining", in_flight=1, draining=Draining(since_s=1, deadline_s=30, in_flight=1),
                 elsewhere=(Elsewhere(router="r2", state="draining", in_flight=2),)),
            store=StoreView(kind="redis", connected=False, since_s=7, error="refused", address="redis://h"),
            routers=("r1", "r2"),
            unusable="a is draining",
        )
    )  # fmt: skip
    assert "a goes when 3 requests have ended, in 30 s at the latest" in lines
    assert "membership is cut off for 7 s from redis://h (refused), 2 routers" in lines
    assert lines[-1] == "no request can be served: a is draining"


def test_names_are_no_markup() -> None:
    out = StringIO()
    show(cluster(view("[bold]x[/bold]", "new", why="[red]")), Console(file=out, width=200))
    assert "[bold]x[/bold]" in out.getvalue()
    assert "[red]" in out.getvalue()


def test_keys_are_sent(router: Router, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    router.answers = [(200, cluster())]
    monkeypatch.setenv("SGLANG_EXT_API_KEY", "k")
    cli.main(["cluster-status", "--router", router.url])
    monkeypatch.setenv("SGLANG_EXT_API_KEY", "from-environment")
    cli.main(["cluster-status", "--router", router.url])
    monkeypatch.delenv("SGLANG_EXT_API_KEY")
    key = tmp_path / "key"
    key.write_text("a key of thirty-two characters or more")
    key.chmod(0o600)
    cli.main(["cluster-status", "--router", router.url, "--cluster-key-file", str(key)])
    first, second, third = (asked[3] for asked in router.asked)
    assert (first, second) == ("Bearer k", "Bearer from-environment")
    moment = int(third.partition(" ")[2].partition(".")[0]) / 1000
    assert read_cluster_key(key).problem(third, "GET", "/cluster", b"", moment) is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((401, b'{"error": {"message": "this needs an administrator\'s key"}}'), "administrator's key"),
        ((404, b"<html>"), "404"),
        ((200, b"<html>"), "does not answer as this router does"),
    ],
)
def test_what_is_wrong_is_said(
    router: Router, capsys: pytest.CaptureFixture[str], answer: tuple[int, bytes], words: str
) -> None:
    router.answers = [answer]
    assert cli.main(["cluster-status", "--router", router.url]) == 1
    assert words in capsys.readouterr().err


def test_an_unreachable_router_is_an_error(capsys: pytest.CaptureFixture[str], unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    assert cli.main(["cluster-status", "--router", url]) == 1
    assert "cannot reach" in capsys.readouterr().err
    assert cli.main(["drain", "--router", url, "a"]) == 1
    assert cli.main(["drain", "--router", "ftp://x", "a"]) == 1


def test_a_drain_waits_for_every_router(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    def other(state: str, count: int) -> tuple[Elsewhere, ...]:
        return (Elsewhere(router="r2", state=state, in_flight=count),)

    router.answers = [
        (200, view("a", "draining", in_flight=2)),
        (200, view("a", "draining", in_flight=1)),
        (200, view("a", "left", why="it has finished", elsewhere=other("draining", 1))),
        (200, view("a", "left", why="it has finished", elsewhere=other("left", 0))),
    ]
    assert cli.main(["drain", "--router", router.url, "a", "--deadline-secs", "5"]) == 0
    out, err = capsys.readouterr()
    assert out == "a is left: it has finished\n"
    assert err.splitlines() == ["a: 2 requests running", "a: 1 requests running"]
    method, path, body, _ = router.asked[0]
    assert (method, path, json.loads(body)) == (
        "POST", "/cluster/instances/a/drain", {"deadline_s": 5.0, "cancel": False},
    )  # fmt: skip
    assert [asked[0] for asked in router.asked[1:]] == ["GET"] * 3


def test_a_drain_that_did_not_end_in_time(router: Router) -> None:
    router.answers = [(200, view("a", "left", in_flight=1))]
    assert cli.main(["drain", "--router", router.url, "a"]) == NOT_FINISHED


def test_a_drain_does_not_wait_with_no_wait_and_is_taken_back_with_cancel(router: Router) -> None:
    router.answers = [(200, view("a", "draining", in_flight=1))]
    assert cli.main(["drain", "--router", router.url, "a", "--no-wait"]) == 0
    assert cli.main(["drain", "--router", router.url, "http://h:1/p", "--cancel"]) == 0
    assert [asked[1] for asked in router.asked] == [
        "/cluster/instances/a/drain",
        "/cluster/instances/http:%2F%2Fh:1%2Fp/drain",
    ]
    assert json.loads(router.asked[1][2])["cancel"] is True


def test_when_a_drain_is_over() -> None:
    assert is_over(view(state="left"))
    assert not is_over(view(state="draining"))
    assert not is_over(view(state="left", elsewhere=(Elsewhere(router="r", state="draining", in_flight=0),)))
