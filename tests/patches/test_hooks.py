"""The effects of the hooks, and the proof that they took."""

from __future__ import annotations

import functools
import inspect
import re
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.keys import KEEP_HEADER, SALT_HEADER
from sglang_ext.patches import readiness
from sglang_ext.patches.adapter.hybrid.chunks import KEPT_PLACES
from sglang_ext.patches.base import Patch
from sglang_ext.patches.hooks import headers, template_errors, vocabulary
from sglang_ext.patches.hooks import scheduler as scheduler_calls
from sglang_ext.patches.hooks import weights as weight_updates
from sglang_ext.patches.hooks.vocabulary import out_of_vocabulary
from sglang_ext.patches.plugin_hooks import Hook, hook_patch
from sglang_ext.patches.process import PROCESS


class Service:
    """Stands where SGLang's classes stand: something with a method to hook."""

    def answer(self, n: int) -> int:
        return n + 1


def wrapped(original: Any, hook: Any) -> Any:
    """As SGLang's registry wraps."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original(*args, **kwargs), *args, **kwargs)

    return wrapper


def our_hook(result: int, *_args: Any) -> int:
    return result


def a_hook() -> Hook:
    return Hook(f"{__name__}.Service.answer", "after", our_hook)


@pytest.fixture
def service_module(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(Service=Service))
    monkeypatch.setattr(Service, "answer", Service.answer)


@pytest.mark.usefixtures("service_module")
def test_a_hook_took_when_its_function_is_called_by_the_target() -> None:
    hook = a_hook()
    assert not hook.took()
    Service.answer = wrapped(Service.answer, our_hook)
    assert hook.took()


@pytest.mark.usefixtures("service_module")
def test_a_hook_is_found_below_the_hooks_of_other_plugins() -> None:
    Service.answer = wrapped(wrapped(Service.answer, our_hook), lambda result, *_: result)
    assert a_hook().took()


@pytest.mark.usefixtures("service_module")
def test_a_hook_that_another_plugin_replaced_did_not_take() -> None:
    Service.answer = wrapped(Service.answer, our_hook)
    Service.answer = lambda self, n: n
    assert not a_hook().took()


def test_a_hook_on_something_that_is_not_there_did_not_take() -> None:
    assert not Hook("sglang.srt.no.such", "after", our_hook).took()


@pytest.fixture
def fresh_readiness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROCESS, "expected", [])
    monkeypatch.setattr(PROCESS, "problems", [])


@pytest.mark.usefixtures("fresh_readiness")
def test_the_start_is_refused_by_the_name_of_the_hook_that_did_not_take() -> None:
    readiness.require()
    readiness.expect(hook_patch("lost", "never applied", a_hook()))
    readiness.report("'older': does not fit")
    with pytest.raises(
        readiness.NotReadyError, match=r"'older'.*'lost' did not take.*Service.answer.*SGLANG_PLUGINS"
    ):
        readiness.require()


class Cache:
    """Records the scheduler's calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def check_hicache_events(self) -> None:
        self.calls.append("events")

    def ready_to_load_host_cache(self) -> int:
        self.calls.append("load")
        return 41

    uses_storage = True
    dram: Any = None

    def meet(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def prefill_begins(self, lengths: list[tuple[int, int]], *, loads: bool) -> None:
        self.calls.append(f"prefill of {lengths}, {loads=}")

    def pass_begins(self, reqs: list[Any]) -> None:
        self.calls.append(f"pass of {reqs}")

    def prefill_ended(self) -> None:
        self.calls.append("prefill ended")

    keeps_awake = False

    def sanity_check(self) -> None:
        self.calls.append("idle")

    def weights_changing(self) -> None:
        self.calls.append("changing")

    def weights_changed(self) -> None:
        self.calls.append("changed")

    def settle(self) -> None:
        self.calls.append("settle")


class Batch:
    def __init__(self, empty: bool = False) -> None:
        self.empty = empty
        self.batch_is_full = True
        self.hicache_consumer_index = -1
        self.extend_lens = [5, 7]
        self.prefix_lens = [0, 16]
        self.reqs = ["a", "b"]
        self.forward_mode = SimpleNamespace(is_extend=lambda: not empty)

    def is_empty(self) -> bool:
        return self.empty


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Cache:
    cache = Cache()
    monkeypatch.setattr(PROCESS, "cache", cache)
    return cache


def test_a_prefill_batch_starts_its_loads_and_carries_their_number(cache: Cache) -> None:
    scheduler, batch = SimpleNamespace(tree_cache=cache), Batch()
    scheduler_calls.after_prefill_batch((batch, Batch()), scheduler, running_batch=None)
    assert batch.hicache_consumer_index == 41
    scheduler_calls.after_batch_result(None, scheduler, batch, "result")
    scheduler_calls.after_batch_result(None, scheduler, Batch(empty=True), "result")  # one of decode
    assert cache.calls == [
        "load",
        "prefill of [(5, 0), (7, 16)], loads=True",
        "pass of ['a', 'b']",
        "prefill ended",
    ]


def test_the_scheduler_follows_the_protocol_for_storage_only_for_a_cache_with_a_disk(cache: Cache) -> None:
    scheduler = SimpleNamespace(tree_cache=cache, enable_hicache_storage=False)
    cache.uses_storage = False
    scheduler_calls.after_running_status(None, scheduler)
    assert not scheduler.enable_hicache_storage
    cache.uses_storage = True
    scheduler_calls.after_running_status(None, scheduler)
    assert scheduler.enable_hicache_storage
    other = SimpleNamespace(tree_cache=object(), enable_hicache_storage=False)
    scheduler_calls.after_running_status(None, other)
    assert not other.enable_hicache_storage


def test_without_a_batch_and_with_nothing_running_the_next_pass_tries_again(cache: Cache) -> None:
    scheduler = SimpleNamespace(tree_cache=cache)
    idle, busy = Batch(empty=True), Batch(empty=False)
    scheduler_calls.after_prefill_batch((None, idle), scheduler)
    scheduler_calls.after_prefill_batch((None, busy), scheduler)
    assert (idle.batch_is_full, busy.batch_is_full) == (False, True)
    assert cache.calls == []


def test_loop_queue_and_idleness_reach_the_cache(cache: Cache) -> None:
    scheduler = SimpleNamespace(tree_cache=cache)
    scheduler_calls.after_ingest([], scheduler)
    slept: list[Any] = []
    scheduler_calls.around_sleep(slept.append, scheduler)
    assert slept == [scheduler]
    assert cache.calls == ["events", "idle"]


class Updater:
    """The parts of SGLang's manager that the hooks read, and its calls, as they leave it."""

    def __init__(self, cache: Cache) -> None:
        self.scheduler = SimpleNamespace(tree_cache=cache)
        self.calls = cache.calls
        self.offload_tags: set[str] = set()
        self._session: object | None = None

    def update(self, _request: Any) -> str:
        self.calls.append("update")
        return "updated"

    def begin(self, _request: Any) -> None:
        self._session = object()

    def end(self, _request: Any) -> None:
        self._session = None

    def release(self, request: Any) -> None:
        self.calls.append("release")
        self.offload_tags |= set(request.tags or ("weights", "kv_cache"))

    def resume(self, request: Any) -> None:
        self.calls.append("resume")
        self.offload_tags -= set(request.tags or ("weights", "kv_cache"))


def test_an_update_is_reported_at_both_ends_also_when_it_fails(cache: Cache) -> None:
    def fails(_manager: Any, _request: Any) -> None:
        raise ValueError("no such checkpoint")

    manager = Updater(cache)
    assert weight_updates.around_weights_change(Updater.update, manager, None) == "updated"
    with pytest.raises(ValueError, match="no such"):
        weight_updates.around_weights_change(fails, manager, None)
    assert cache.calls == ["changing", "update", "changed", "changing", "changed"]


def test_the_transfer_of_kv_is_reported_too_also_without_our_cache(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_ext.patches.adapter.pd import kv_hooks

    for name in ("weights_changing", "weights_changed"):
        monkeypatch.setattr(kv_hooks, name, lambda scheduler, name=name: cache.calls.append(name))
    manager = Updater(cache)
    manager.scheduler = SimpleNamespace(
        tree_cache=object(), server_args=SimpleNamespace(disaggregation_transfer_backend="global")
    )
    weight_updates.around_weights_change(Updater.update, manager, None)
    assert cache.calls == ["weights_changing", "update", "weights_changed"]


def test_in_a_session_of_updates_weights_stand_still_at_its_end_only(cache: Cache) -> None:
    manager = Updater(cache)
    for call in (Updater.begin, Updater.update, Updater.update, Updater.end):
        weight_updates.around_weights_change(call, manager, None)
    assert cache.calls == ["changing", "changing", "update", "changing", "update", "changing", "changed"]


@pytest.mark.parametrize("tags", [None, [], ["weights"], ["weights", "kv_cache"]])
def test_weights_without_memory_change_until_it_is_back(cache: Cache, tags: list[str] | None) -> None:
    manager, request = Updater(cache), SimpleNamespace(tags=tags)
    weight_updates.around_release(Updater.release, manager, request)
    weight_updates.around_weights_change(Updater.update, manager, None)
    weight_updates.around_resume(Updater.resume, manager, request)
    expected = ["settle", "changing", "release", "changing", "update", "resume", "changed"]
    assert cache.calls == expected


def test_memory_of_kv_alone_says_nothing_of_weights(cache: Cache) -> None:
    manager, request = Updater(cache), SimpleNamespace(tags=["kv_cache"])
    weight_updates.around_release(Updater.release, manager, request)
    weight_updates.around_resume(Updater.resume, manager, request)
    assert cache.calls == ["settle", "release", "resume"]


@pytest.mark.parametrize(
    ("action", "told"),
    [("reset_tensors", True), ("checksum", False), ("snapshot", False), ("compare", False)],
)
def test_a_check_that_overwrites_weights_changes_them(cache: Cache, action: str, told: bool) -> None:
    manager = Updater(cache)
    weight_updates.around_check(Updater.update, manager, SimpleNamespace(action=action))
    assert cache.calls == (["changing", "update", "changed"] if told else ["update"])


def test_sglang_gives_each_load_of_an_adapter_an_id_of_its_own() -> None:
    """So an adapter that is loaded again under its name, with other weights, is another tenant."""
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin

    first, second = (LoRARef(lora_name="a", lora_path="/a") for _ in range(2))
    assert first.lora_id != second.lora_id
    for load in ("load_lora_adapter", "load_lora_adapter_from_tensors"):
        source = inspect.getsource(getattr(TokenizerControlMixin, load))
        (made,) = re.findall(r"LoRARef\((.*?)\)", source, re.DOTALL)
        assert "lora_id" not in made


def test_a_cache_that_brings_something_in_sleeps_for_a_moment_only(cache: Cache) -> None:
    naps: list[int] = []
    slept: list[Any] = []
    sleeper = SimpleNamespace(poller=SimpleNamespace(poll=naps.append))
    cache.keeps_awake = True
    scheduler_calls.around_sleep(slept.append, SimpleNamespace(tree_cache=cache, idle_sleeper=sleeper))
    scheduler_calls.around_sleep(slept.append, SimpleNamespace(tree_cache=cache, idle_sleeper=None))
    assert (naps, slept) == ([scheduler_calls.NAP_MILLISECONDS], [])
    assert cache.calls == ["idle", "idle"]


def test_an_embedding_batch_waits_for_its_loads(cache: Cache) -> None:
    """Over the worker's own method, of which SGLang makes no use when it embeds."""
    from sglang.srt.managers.tp_worker import TpModelWorker

    gate: list[int] = []
    worker = SimpleNamespace(hicache_layer_transfer_counter=SimpleNamespace(set_consumer=gate.append))
    worker.set_hicache_consumer = lambda index: TpModelWorker.set_hicache_consumer(worker, index)
    batch = Batch()
    scheduler_calls.after_prefill_batch((batch, Batch(empty=True)), SimpleNamespace(tree_cache=cache))
    scheduler_calls.before_embedding(worker, batch)
    scheduler_calls.before_embedding(worker, Batch())
    assert gate == [41, -1]


def test_beam_search_is_refused_where_kv_is_loaded(cache: Cache) -> None:
    coordinator = SimpleNamespace(tree_cache=cache)
    stock: list[Any] = []

    def validate(*given: Any) -> str:
        stock.append(given)
        return "SGLang's own word"

    assert scheduler_calls.around_beam(validate, coordinator, "req", "received") == "SGLang's own word"
    assert stock == [(coordinator, "req", "received")]
    cache.dram = object()
    assert "--kv-dram-size" in str(scheduler_calls.around_beam(validate, coordinator, "req", "received"))
    other = SimpleNamespace(tree_cache=object())
    assert scheduler_calls.around_beam(validate, other, "req", "received") == "SGLang's own word"


def test_every_call_that_changes_weights_is_hooked() -> None:
    """The manager's methods of today; a new way to change weights must be looked at."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    methods = {name for name in vars(SchedulerWeightUpdaterManager) if not name.startswith("_")}
    hooked = {target.rpartition(".")[2] for target in weight_updates.PATCH.targets}
    harmless = {
        *(
            "tp_worker",
            "draft_worker",
            "tp_cpu_group",
            "memory_saver_adapter",
            "flush_cache",
            "is_fully_idle",
        ),
        *("scheduler", "metrics_collector", "offload_tags", "stashed_model_static_state"),
        *("flush_cache_after_weight_update", "record_weight_version_after_update", "get_weights_by_name"),
        *("init_weights_update_group", "destroy_weights_update_group"),
        *("save_remote_model", "save_sharded_model"),
    }
    assert methods - hooked - harmless == set()


def test_another_cache_is_not_called(cache: Cache) -> None:
    """A server with SGLang's own cache runs as without the plugin."""
    for scheduler in (SimpleNamespace(tree_cache=Cache()), SimpleNamespace(), None):
        batch, idle = Batch(), Batch(empty=True)
        scheduler_calls.after_ingest([], scheduler)
        slept: list[Any] = []
        scheduler_calls.around_sleep(slept.append, scheduler)
        assert slept == [scheduler]
        scheduler_calls.after_prefill_batch((batch, idle), scheduler)
        scheduler_calls.after_prefill_batch((None, idle), scheduler)
        assert batch.hicache_consumer_index == -1
        assert idle.batch_is_full
    assert cache.calls == []


@pytest.mark.parametrize("ids", [[], [0], [5, 99], array("q", [0, 99])])
def test_ids_in_the_vocabulary_pass(ids: Any) -> None:
    assert out_of_vocabulary(ids, 100) is None


@pytest.mark.parametrize(
    ("ids", "index", "token"), [([100], 0, 100), ([5, -1], 1, -1), (array("q", [1, 2, 2**40]), 2, 2**40)]
)
def test_the_first_id_outside_is_named(ids: Any, index: int, token: int) -> None:
    message = out_of_vocabulary(ids, 100)
    assert message is not None
    assert f"input_ids[{index}] is {token}," in message
    assert "0 to 99" in message


def request_of(ids: list[int], **other: Any) -> SimpleNamespace:
    return SimpleNamespace(origin_input_ids=ids, vocab_size=100, multimodal_inputs=None, **other)


def test_the_check_joins_the_schedulers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROCESS, "checks_vocabulary", False)
    bad = request_of([100])
    assert vocabulary.after_length_check(None, bad, 10, False) is None, "off until a request wants it"
    monkeypatch.setattr(PROCESS, "checks_vocabulary", True)
    assert "input_ids[0]" in str(vocabulary.after_length_check(None, bad, 10, False))
    assert vocabulary.after_length_check("too long", bad, 10, False) is None, "SGLang's error stays"
    assert vocabulary.after_length_check(None, request_of([99]), 10, False) is None
    assert vocabulary.after_length_check(None, request_of([]), 10, False) == vocabulary.EMPTY
    image = request_of([2**40])
    image.multimodal_inputs = object()
    assert vocabulary.after_length_check(None, image, 10, False) is None


def test_patches_of_hooks_list_their_targets() -> None:
    patch: Patch = scheduler_calls.PATCH
    assert [target.rpartition(".")[2] for target in patch.targets] == [
        "ingest_requests",
        "_get_new_batch_prefill_raw",
        "_select_prefill_admission",
        "add_chunked_req",
        "init_running_status",
        "process_batch_result",
        "forward_batch_embedding",
        "validate_and_init",
        "maybe_sleep_on_idle",
        "init_hicache_draft_plan",
    ]


def test_a_chat_template_that_fails_names_the_field() -> None:
    def stock(_serving: Any, request: Any, error: Exception) -> None:
        raise error

    asked = SimpleNamespace(chat_template_kwargs={"divisor": 0})
    plain = SimpleNamespace(chat_template_kwargs=None)
    around = template_errors.around_process
    with pytest.raises(ValueError, match="chat_template_kwargs cannot be used: the chat template failed"):
        around(stock, None, asked, ZeroDivisionError("division by zero"))
    with pytest.raises(ValueError, match="messages cannot be used"):
        around(stock, None, plain, KeyError("x"))
    with pytest.raises(ValueError, match="as it was") as caught:
        around(stock, None, asked, ValueError("as it was"))
    assert str(caught.value) == "as it was"
    assert around(lambda *_: "messages", None, asked, False) == "messages"


def test_embeddings_have_the_served_name() -> None:
    serving = SimpleNamespace(tokenizer_manager=SimpleNamespace(served_model_name="m"))
    answer = headers.after_build(SimpleNamespace(model="/disk/m", data=[]), serving, [], "float")
    assert answer == SimpleNamespace(model="m", data=[])


def test_the_salt_of_a_header_goes_to_the_scheduler() -> None:
    """A client's own value in its place is removed, with the header and without."""

    def queued(sent: dict[str, str] | None, custom: Any) -> tuple[str | None, Any]:
        """The salt and the parameters of a request to embed."""
        headers.before_request(None, None, None if sent is None else SimpleNamespace(headers=sent))
        params = SimpleNamespace(custom_params=custom)
        headers.after_tokenized(SimpleNamespace(sampling_params=params), None)
        req = SimpleNamespace(sampling_params=params, cache_salt=None)
        headers.before_queue(None, req)
        return req.cache_salt, params.custom_params

    salted, ours = {SALT_HEADER: "kv-tenant-a"}, {headers.SALT: "kv-tenant-a"}
    theirs = {headers.SALT: "kv-tenant-b"}
    assert queued(salted, None) == ("kv-tenant-a", ours)
    assert queued(salted, {"x": 1} | theirs) == ("kv-tenant-a", {"x": 1} | ours)
    assert queued({}, {"x": 1} | theirs) == (None, {"x": 1})
    assert queued(None, theirs) == (None, {})
    assert queued(None, None) == (None, None)


def test_a_request_to_generate_has_a_field_for_the_salt() -> None:
    """As a score or a reranking by a model that generates."""
    headers.before_request(None, None, SimpleNamespace(headers={SALT_HEADER: "kv-tenant-a"}))
    params = SimpleNamespace(custom_params=None)
    message = headers.after_tokenized(SimpleNamespace(sampling_params=params, cache_salt=None), None)
    assert (message.cache_salt, params.custom_params) == ("kv-tenant-a", None)
    headers.before_request(None, None)
    message = headers.after_tokenized(SimpleNamespace(sampling_params=params, cache_salt="own"), None)
    assert message.cache_salt == "own"


def test_places_of_a_header_go_to_the_scheduler_s_request() -> None:
    """A client's own value in their place is removed; a value that is no list of places is ignored."""

    def queued(sent: dict[str, str], custom: Any = None) -> tuple[Any, Any]:
        headers.before_request(None, None, SimpleNamespace(headers=sent))
        params = SimpleNamespace(custom_params=custom)
        headers.after_tokenized(SimpleNamespace(sampling_params=params, cache_salt=None), None)
        req = SimpleNamespace(sampling_params=params)
        headers.before_queue(None, req)
        return getattr(req, KEPT_PLACES, None), params.custom_params

    assert queued({KEEP_HEADER: "512,1024"}) == ((512, 1024), None)
    assert queued({KEEP_HEADER: "512"}, {"x": 1}) == ((512,), {"x": 1})
    assert queued({}, {"x": 1, headers.KEEP: [7]}) == (None, {"x": 1})
    for wrong in ("", "a", "1,", "-1", "1 2", "1,2,3,4,5", "9" * 10):
        assert queued({KEEP_HEADER: wrong}) == (None, None)
