"""The hook that aborts the named request only, around the installed SGLang's own ``abort_request``."""

from __future__ import annotations

import ast
import logging
from collections import defaultdict
from collections.abc import Callable
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.patches.contract.places import folder_of
from sglang_ext.patches.hooks import exact_abort
from sglang_ext.patches.process import PROCESS

pytestmark = pytest.mark.slow

NAMES = ("job-1", "job-10", "job-11", "job")
QUEUES = {
    "null": {"waiting", "running", "grammar", "chunked"},
    "prefill": {"waiting", "running", "grammar", "chunked", "bootstrap", "inflight"},
    "decode": {"waiting", "running", "grammar", "chunked", "prealloc", "transfer", "retracted"},
}
IS_PREFIX = ".rid.startswith(recv_req.rid)"


class Kv:
    """A request's KV sender or receiver, which also stands for a request without KV."""

    holds_mamba = holds_kv = False

    def __init__(self) -> None:
        self.ended = False

    def abort(self) -> None:
        self.ended = True


class Req:
    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.kv = self.disagg_kv_sender = Kv()
        self.finished_reason = self.to_finish = self.grammar = None
        self.ended = False

    def finished(self) -> bool:
        return False

    def set_finish_with_abort(self, _why: str) -> None:
        self.ended = True

    @property
    def aborted(self) -> bool:
        return self.ended or self.kv.ended or self.to_finish is not None


class Waiting:
    """A request in one of decode's queues."""

    host_staged = False

    def __init__(self, req: Req) -> None:
        self.req = req
        self.kv_receiver = req.kv


def method(module: str, name: str, class_: str, world: dict[str, Any]) -> Callable[..., Any]:
    """A method of SGLang's, with the functions that it calls replaced."""
    tree = ast.parse((folder_of("sglang") / "srt" / module).read_text(encoding="utf-8"))
    owner = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_)
    found = next(node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == name)
    found.args.args[1].annotation = None
    exec(compile(ast.Module([found], []), module, "exec"), world)
    result: Callable[..., Any] = world[name]
    return result


class Scheduler:
    """Has every queue in which SGLang looks for a request, with each of `NAMES` in one of them."""

    def __init__(self, mode: str, queue: str) -> None:
        modes = SimpleNamespace(**{each.upper(): SimpleNamespace(value=each) for each in QUEUES})
        world = {
            "DisaggregationMode": modes,
            "FINISH_ABORT": lambda *_: "aborted",
            "HTTPStatus": HTTPStatus,
            "logger": logging.getLogger("test"),
            "get_parallel": lambda: SimpleNamespace(pp_size=1),
            "get_disagg": lambda: SimpleNamespace(
                disaggregation_decode_host_receive_threshold=1, disaggregation_decode_retraction_backup=""
            ),
            "_make_abort_req": lambda req, **_: req,
            "release_kv_cache": lambda *_args, **_kwargs: None,
            "discard_kv_cache_backup": lambda *_: None,
            "futures": SimpleNamespace(Future=Exception),
        }
        self.reqs = [Req(name) for name in NAMES]
        placed: dict[str, list[Any]] = defaultdict(list, {queue: list(self.reqs)})
        grammar = SimpleNamespace(grammar_queue=placed["grammar"])
        in_grammar = method("constrained/grammar_manager.py", "abort_requests", "GrammarManager", world)
        grammar.abort_requests = lambda message: in_grammar(grammar, message)
        self.stock = method("managers/scheduler.py", "abort_request", "Scheduler", world)
        self.grammar_manager = grammar
        self.chunked_req = next((req for req in placed["chunked"] if req.rid == "job-10"), None)
        self._pending_chunked_abort_req: Req | None = None
        self.mm_receiver = self.dllm_config = None
        self.enable_hisparse = False
        self.tree_cache = object()
        self.beam_coordinator = SimpleNamespace(retire_group=lambda _: None)
        self.disaggregation_mode = getattr(modes, mode.upper())
        self.waiting_queue = placed["waiting"]
        self.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=placed["bootstrap"])
        self.disagg_prefill_inflight_queue = placed["inflight"]
        self.disagg_decode_prealloc_queue = SimpleNamespace(
            queue=[Waiting(req) for req in placed["prealloc"]], retracted_queue=placed["retracted"]
        )
        self.disagg_decode_transfer_queue = SimpleNamespace(
            queue=[Waiting(req) for req in placed["transfer"]]
        )
        self.running = placed["running"]
        self.ipc_channels = SimpleNamespace(
            send_to_tokenizer=SimpleNamespace(send_output=self.send_abort_output)
        )

    def collect_inflight_reqs(self) -> set[Req]:
        return set(self.running)

    def _release_aborted_request(self, _req: Req) -> None:
        pass

    def release_aborted_prefill_waiting_req(self, _req: Req) -> None:
        pass

    def send_abort_output(self, _message: Any, req: Req) -> None:
        req.ended = True

    def aborted(self) -> set[str]:
        pending = self._pending_chunked_abort_req
        return {req.rid for req in self.reqs if req.aborted or req is pending}


def message(rid: str, *, abort_all: bool = False) -> Any:
    return SimpleNamespace(rid=rid, abort_all=abort_all, finished_reason=None, abort_message=None)


@pytest.fixture(params=[(mode, queue) for mode in QUEUES for queue in sorted(QUEUES[mode])], ids="-".join)
def scheduler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    made = Scheduler(*request.param)
    monkeypatch.setattr(PROCESS, "cache", made.tree_cache)
    return made


def test_only_the_named_request_is_aborted(scheduler: Scheduler) -> None:
    exact_abort.around_abort(scheduler.stock, scheduler, message("job-1"))
    assert scheduler.aborted() == (set() if scheduler.chunked_req is not None else {"job-1"})
    assert sorted(req.rid for req in scheduler.reqs) == sorted(NAMES)
    exact_abort.around_abort(scheduler.stock, scheduler, message("job-10"))
    assert "job-10" in scheduler.aborted()


def test_an_empty_name_aborts_nothing_and_abort_all_everything(scheduler: Scheduler) -> None:
    exact_abort.around_abort(scheduler.stock, scheduler, message(""))
    assert scheduler.aborted() == set()
    exact_abort.around_abort(scheduler.stock, scheduler, message("", abort_all=True))
    assert scheduler.aborted() == ({"job-10"} if scheduler.chunked_req is not None else set(NAMES))


def test_without_the_hook_names_that_begin_alike_are_aborted_too(scheduler: Scheduler) -> None:
    """The twin: the stand-in does hold requests where SGLang looks for them."""
    scheduler.stock(scheduler, message("job-1"))
    expected = {"job-10"} if scheduler.chunked_req is not None else {"job-1", "job-10", "job-11"}
    assert scheduler.aborted() == expected


def test_sglang_compares_names_nowhere_else() -> None:
    """Each place that compares is a queue above; multimodal encoders and diffusion models are not served."""
    srt = folder_of("sglang") / "srt"
    source = (srt / "managers/scheduler.py").read_text(encoding="utf-8")
    grammar = (srt / "constrained/grammar_manager.py").read_text(encoding="utf-8")
    assert source.count(IS_PREFIX) + grammar.count(IS_PREFIX) == len(set().union(*QUEUES.values()))
