"""Large figures of the papers at their sizes, in the simulator: `python -m benchmarks.fleet.papers`.

The costs are estimates by the roofline model (`sglang_ext.cost_model.estimated`) of the papers' models and
devices, at the bytes of KV a token that these have: nothing here was measured on a GPU. A fleet that
recomputes serves the same prompts, each behind a first block of its own, so that none is like another.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks.fleet.cells import Figures, figures_of
from benchmarks.lib.common import SEED, Options, Report, percentile
from benchmarks.lib.data import data_folder
from benchmarks.policies.fleet import NamedSession
from benchmarks.policies.workloads import BLOCK_TOKENS, SimSession, arriving, loogle, repeated, sharegpt
from sglang_ext.cost_model import CostModel
from sglang_ext.cost_model.estimated import DEVICES, Device, estimated
from sglang_ext.cost_model.operators import Link
from sglang_ext.cost_model.profile import Decode, Profile
from sglang_ext.flags import flag
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.simulator.outcome import Outcome
from sglang_ext.simulator.run import Simulation, simulate
from sglang_ext.simulator.settings import Settings, checked
from sglang_ext.simulator.virtual_time import VirtualLoop
from sglang_ext.simulator.workload import Session, Turn

NAME = "fleet.papers"
GB, KIB = 1e9, 1024
NVLINK = 200 * GB
"""Bytes a second between instances on two H800s each: half of the peak."""
A100 = Device(312e12, 2.039e12, 25e9, 3e-3)
"""Dense operations in bfloat16 of the SXM module, by NVIDIA's data sheet, and PCIe 4."""
LLAMA_3_8B = {
    "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
LLAMA_2_13B = {
    "num_hidden_layers": 40, "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40,
    "vocab_size": 32000,
}  # fmt: skip
MISTRAL_LARGE = {
    "num_hidden_layers": 88, "hidden_size": 12288, "intermediate_size": 28672, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768,
}  # fmt: skip
SYMPHONYS_BYTES = 1_100_000
"""Of a token of Llama-3.1-8B, as Symphony has it (section 2.3)."""


@dataclass(frozen=True, kw_only=True)
class PapersOptions(Options):
    """The flags of this benchmark."""

    parts: tuple[str, ...] = flag(
        (
            "memserve",
            "memserve-designs",
            "symphony",
            "symphony-own",
            "symphony-13b",
            "kvdirect",
            "kvdirect-own",
        ),
        "Papers; -own: with the bytes or the time a token that the paper has.",
        metavar="NAME",
        several="append",
    )


def costs(config: dict[str, int], device: Device, tp: int, network: float) -> Profile:
    """An estimated profile.

    Args:
        network: bytes a second from another instance.
    """
    base = estimated(config, "h100", model="paper", tp=tp)
    h100 = DEVICES["h100"]
    slower, narrower = h100.flops_per_s / device.flops_per_s, h100.bytes_per_s / device.bytes_per_s
    fixed, context, token, pair, *rest = base.arch.coefficients
    decode = base.decode
    assert decode is not None
    arch = msgspec.structs.replace(
        base.arch,
        coefficients=(
            device.around_s + (fixed - h100.around_s) * narrower,
            context * narrower,
            token * slower,
            pair * slower,
            *rest,
        ),
    )
    each_s = decode.per_request_s
    step = Decode.linear((decode.steps_s[0] - each_s) * narrower, each_s * slower, context * narrower)
    loads = {"dram": Link(1e-4, 1 / (device.loads_bytes_per_s * tp))}
    return msgspec.structs.replace(
        base, arch=arch, decode=step, tiers=loads, transfer=Link(1e-3, 1 / network)
    )


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A session whose prompts are like no other prompt."""

    of: Session

    @property
    def name(self) -> str:
        return self.of.name

    @property
    def tenant(self) -> int:
        return self.of.tenant

    @property
    def start_s(self) -> float:
        return self.of.start_s

    def turns(self) -> Iterator[Turn]:
        for number, turn in enumerate(self.of.turns()):
            mark = random.Random(f"{self.name}/{number}").randbytes(BLOCK_TOKENS * TOKEN_BYTES)
            yield dataclasses.replace(turn, key=mark + turn.key[len(mark) :])


@dataclass(frozen=True, slots=True)
class Continued(NamedSession):
    """A session whose answers are the tokens that the next prompt has behind the one before."""

    def turns(self) -> Iterator[Turn]:
        turns = list(super(Continued, self).turns())
        for turn, after in itertools.zip_longest(turns, turns[1:]):
            said = b"" if after is None else after.key[len(turn.key) :][: len(turn.answer)]
            yield dataclasses.replace(turn, answer=said + turn.answer[len(said) :])


# -- MemServe -----------------------------------------------------------------------------------------


def memserve(options: PapersOptions, report: Report) -> None:
    """Figure 15: LooGLE at share ratios, three prefill instances and one decode instance."""
    folder = data_folder()
    documents = loogle(folder, options.pick(80, quick=80, tiny=6))
    profile = costs(LLAMA_2_13B, DEVICES["h100"], 2, NVLINK)
    hbm = int((2 * 80 * GB * 0.9 - 26 * GB) / profile.kv_bytes_per_token / BLOCK_TOKENS)
    for share in (1, 2):
        for rate in options.pick((60.0, 100.0), quick=(60.0,), tiny=(60.0,)):
            found = {}
            for policy, caching in itertools.product(("session", "prompt-tree", "cost"), (2, 3)):
                settings = Settings(
                    prefill=3, decode=1, instances=4, policy=policy, hbm=hbm, dram=1, fetch=False,
                    requests=10_000, chunk=8192, layers=40, network=NVLINK, pd_caching=caching,
                )  # fmt: skip
                sessions = arriving(repeated(documents, share), rate, SEED)
                found[policy, caching] = _run(settings, profile, map(NamedSession, _ordered(sessions)))
            for (policy, caching), outcome in found.items():
                p99 = percentile(outcome.ttft, 99)
                report.add(
                    "MemServe, figure 15: LooGLE, 3P1D, Llama-2-13B at TP 2, 800 KiB a token",
                    share_ratio=share,
                    sessions_per_s=rate,
                    policy=policy,
                    pd_caching=caching,
                    kib_a_token=profile.kv_bytes_per_token / KIB,
                    p99_ms=p99 * 1e3,
                    p99_vs_session=p99 / percentile(found["session", 2].ttft, 99),
                    reused=sum(outcome.hits.values()) / outcome.prompt_tokens,
                    capacity_used=outcome.capacity_used,
                )


DESIGNS = {
    "3 colocated, nothing cached": (0, 0, 1),
    "3 colocated": (0, 0, 1),
    "1P2D, nothing cached": (1, 2, 1),
    "1P2D, caching 1": (1, 2, 1),
    "1P2D, caching 2": (1, 2, 2),
    "1P2D, caching 3": (1, 2, 3),
}
"""Figure 8's systems: instances that prefill, that decode, and `pd_caching`."""


def memserve_designs(options: PapersOptions, report: Report) -> None:
    """Figure 8: ShareGPT, three colocated instances beside a prefill and two decode instances."""
    talks = [talk for talk in sharegpt(data_folder(), options.pick(400, quick=80, tiny=6)) if talk.requests]
    profile = costs(LLAMA_2_13B, DEVICES["h100"], 2, NVLINK)
    hbm = int((2 * 80 * GB * 0.9 - 26 * GB) / profile.kv_bytes_per_token / BLOCK_TOKENS)
    for rate in options.pick((3.0, 9.0, 15.0), quick=(9.0,), tiny=(9.0,)):
        found = {}
        for design, (prefill, decode, caching) in DESIGNS.items():
            settings = checked(
                Settings(
                    instances=3, policy="prompt-tree", hbm=hbm, dram=1, fetch=False, requests=10_000,
                    chunk=8192, layers=40, network=NVLINK, prefill=prefill, decode=decode,
                    pd_caching=caching,
                )
            )  # fmt: skip
            sessions: Iterator[Session] = map(Continued, _ordered(arriving(talks, rate, SEED)))
            if "nothing" in design:
                sessions = map(Recomputed, sessions)
            found[design] = _run(settings, profile, sessions)
        first = found["3 colocated, nothing cached"]
        for design, outcome in found.items():
            row: dict[str, float | str] = {"sessions_per_s": rate, "design": design}
            for name in ("ttft", "jct"):
                times, before = getattr(outcome, name), getattr(first, name)
                mean = sum(times) / len(times)
                row |= {
                    f"{name}_ms": mean * 1e3,
                    f"{name}_vs_first": mean / (sum(before) / len(before)),
                    f"{name}_p99_vs_first": percentile(times, 99) / percentile(before, 99),
                }
            report.add(
                "MemServe, figure 8: ShareGPT, Llama-2-13B at TP 2",
                **row,
                reused=sum(outcome.hits.values()) / outcome.prompt_tokens,
                between_gb=outcome.link_bytes["between instances"] / GB,
                capacity_used=outcome.capacity_used,
            )


def _ordered(sessions: Sequence[SimSession]) -> list[SimSession]:
    return sorted(sessions, key=lambda session: session.start_s)


def _run(settings: Settings, profile: Profile, sessions: Iterator[Session]) -> Outcome:
    return simulate(settings, CostModel(profile), sessions=sessions)


# -- Symphony -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UserSession:
    """A conversation of a user, after whose end the user begins another one.

    talks: that users have. user: its number. round: of the user's conversations, from 0.
    """

    talks: Sequence[SimSession]
    user: int
    users: int
    round: int = 0

    @property
    def name(self) -> str:
        return f"{self.user}/{self.round}"

    @property
    def tenant(self) -> int:
        return 0

    @property
    def start_s(self) -> float:
        return 30.0 * self.user / self.users

    def turns(self) -> Iterator[Turn]:
        place = (self.user + self.round * self.users) % len(self.talks)
        own = random.Random(f"conversation {self.name}").randbytes(BLOCK_TOKENS * TOKEN_BYTES)
        for turn in NamedSession(self.talks[place]).turns():
            # Users who have the same of the recorded conversations do not share it.
            yield dataclasses.replace(turn, key=own + turn.key)


def thinking(talks: Sequence[SimSession]) -> list[SimSession]:
    """The conversations, with the times that reading an answer and typing a question takes: 4 words of
    1.3 tokens a second read, 0.7 written.
    """
    found = []
    for talk in talks:
        requests, before = [], None
        for request in talk.requests:
            think_s = 0.0
            if before is not None:
                new = (len(request.blocks) - len(before.blocks)) * BLOCK_TOKENS - before.output_tokens
                think_s = min(120.0, before.output_tokens / 5.2 + max(1, new) / 0.9)
            requests.append(dataclasses.replace(request, think_s=think_s))
            before = request
        found.append(dataclasses.replace(talk, requests=tuple(requests)))
    return found


def closed(settings: Settings, model: CostModel, sessions: Iterator[Session], wrap: Any) -> Outcome:
    """A simulation in which each user begins another conversation when one has ended."""
    loop = VirtualLoop()
    try:
        run = Simulation(checked(settings), model, loop, sessions)

        def after(session: Session) -> Session | None:
            user = session.of if isinstance(session, Recomputed) else session
            assert isinstance(user, UserSession)
            return wrap(dataclasses.replace(user, round=user.round + 1))  # type: ignore[no-any-return]

        run.after = after
        loop.run_until_complete(run.run())
        return run.outcome
    finally:
        loop.close()


SYSTEMS: dict[str, dict[str, Any]] = {
    "recompute (vLLM)": {"policy": "least-load", "dram": 1, "fetch": False},
    "sticky, with DRAM (InferCept)": {"policy": "session", "fetch": False},
    "cost, hints, fetching (ours)": {"policy": "cost", "hints": 1.0},
}


@dataclass(frozen=True, slots=True)
class SymphonysModel:
    """A model of Symphony's evaluation.

    figure: of the paper. config: the model's configuration. kv_bytes: of KV a token.
    """

    figure: int
    name: str
    config: dict[str, int]
    kv_bytes: int
    weights_bytes: float


SYMPHONYS_MODELS = {
    "symphony": SymphonysModel(12, "Llama-3.1-8B", LLAMA_3_8B, 128 * KIB, 16 * GB),
    "symphony-own": SymphonysModel(12, "Llama-3.1-8B", LLAMA_3_8B, SYMPHONYS_BYTES, 16 * GB),
    "symphony-13b": SymphonysModel(13, "Llama-2-13B", LLAMA_2_13B, 800 * KIB, 26 * GB),
}


def symphony(options: PapersOptions, report: Report, model: SymphonysModel) -> None:
    """Figures 12 and 13: eight A100s, 64 to 1,024 users of ShareGPT's conversations."""
    kv_bytes = model.kv_bytes
    talks = thinking(sharegpt(data_folder(), options.pick(400, quick=100, tiny=10)))
    profile = msgspec.structs.replace(costs(model.config, A100, 1, 3.1 * GB), kv_bytes_per_token=kv_bytes)
    sizes = {
        "hbm": int((80 * GB * 0.9 - model.weights_bytes) / kv_bytes / BLOCK_TOKENS),
        "dram": int(256 * GB / 4 / kv_bytes / BLOCK_TOKENS),
    }
    for users in options.pick((64, 256, 512, 1024), quick=(64, 256), tiny=(8,)):
        for system, changes in SYSTEMS.items():
            settings = Settings(
                **(sizes | {"instances": 8, "requests": 3 * users, "network": 3.1 * GB} | changes)
            )
            wrap: Callable[[Session], Session] = Recomputed if "recompute" in system else _same
            first = (wrap(UserSession(talks, user, users)) for user in range(users))
            outcome = closed(settings, CostModel(profile), first, wrap)
            _symphony_row(report, model, users, system, outcome, settings)


def _same(session: Session) -> Session:
    return session


def _symphony_row(
    report: Report, model: SymphonysModel, users: int, system: str, outcome: Outcome, settings: Settings
) -> None:
    figures: Figures = figures_of(outcome, settings)
    report.add(
        f"Symphony, figure {model.figure}: ShareGPT, 8 x A100, {model.name}",
        kib_a_token=model.kv_bytes / KIB,
        users=users,
        system=system,
        tpot_ms=1e3 * sum(outcome.tpot) / max(1, len(outcome.tpot)),
        per_token_ms=1e3 * sum(outcome.jct) / outcome.output_tokens,
        ttft_mean_ms=figures["ttft_mean_ms"],
        ttft_p99_ms=figures["ttft_p99_ms"],
        reused=figures["reused"],
        busiest=figures["busiest"],
        capacity_used=figures["capacity_used"],
    )


# -- KVDirect -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OneRequest:
    """A request that is like no other."""

    number: int
    start_s: float
    tokens: int
    answer: int

    @property
    def name(self) -> str:
        return f"request {self.number}"

    @property
    def tenant(self) -> int:
        return 0

    def turns(self) -> Iterator[Turn]:
        draw = random.Random(self.name)
        yield Turn(draw.randbytes(self.tokens * TOKEN_BYTES), draw.randbytes(self.answer * TOKEN_BYTES))


KVDIRECTS_STEP_S = 0.045
"""Least time between two tokens in KVDirect's section 5.2.2."""
LOADS = {"arXiv": (40_642, 241, 0.55), "ShareGPT": (20_471, 2_328, 0.24)}
"""Mean tokens of prompts and answers, and by how much KVDirect's latency is less (section 5.2.1)."""


def kvdirect(options: PapersOptions, report: Report, step_s: float = 0.0) -> None:
    """Figure 13: one prefill and one decode instance beside two that do both.

    Args:
        step_s: of a step of generation, for one request; 0: as estimated.
    """
    for load, (prompt, answer, papers) in LOADS.items():
        profile = costs(MISTRAL_LARGE, DEVICES["h100"], 8, 400 * GB)
        if step_s and profile.decode is not None:
            longer_s = step_s - profile.decode.steps_s[0]
            steps_s = tuple(seconds + longer_s for seconds in profile.decode.steps_s)
            decode = msgspec.structs.replace(profile.decode, steps_s=steps_s)
            profile = msgspec.structs.replace(profile, decode=decode)
        hbm = int((8 * 80 * GB * 0.9 - 246 * GB) / profile.kv_bytes_per_token / BLOCK_TOKENS)
        for rate in options.pick((0.1, 0.3, 0.5), quick=(0.3,), tiny=(0.3,)):
            requests = options.pick(100, quick=50, tiny=5)
            draw = functools.partial(_drawn, prompt, answer, rate, requests)
            base: dict[str, Any] = {
                "policy": "least-load",
                "hbm": hbm,
                "dram": 1,
                "fetch": False,
                "chunk": 1 << 17,
            }
            base |= {"requests": requests, "layers": 88, "network": 400 * GB}
            apart = _run(Settings(**base, prefill=1, decode=1, instances=2), profile, draw())
            both = _run(Settings(**base, instances=2), profile, draw())
            report.add(
                "KVDirect, figure 13: 1P1D against two colocated, Mistral-Large at TP 8, 352 KiB a token",
                load=load,
                step_s=step_s,
                requests_per_s=rate,
                kib_a_token=profile.kv_bytes_per_token / KIB,
                **_latencies(apart, both),
                papers_latency=1 - papers,
            )


def _drawn(prompt: int, answer: int, rate: float, requests: int) -> Iterator[OneRequest]:
    """Requests with such mean lengths, whose logarithms vary by 0.5."""
    draw, now = random.Random(SEED), 0.0
    for number in range(requests):
        now += draw.expovariate(rate)
        lengths = (draw.lognormvariate(-0.125, 0.5) for _ in range(2))
        tokens, more = (
            max(2, round(mean * each)) for mean, each in zip((prompt, answer), lengths, strict=True)
        )
        yield OneRequest(number, now, tokens, more)


def _latencies(apart: Outcome, both: Outcome) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in ("jct", "ttft", "tpot"):
        ours, theirs = (percentile(getattr(each, name), 90) for each in (apart, both))
        found |= {f"{name}_p90_s": ours, f"{name}_p90_vs_colocated": ours / theirs}
    return found | {"capacity_used": apart.capacity_used, "colocated_capacity": both.capacity_used}


PARTS: dict[str, Callable[[PapersOptions, Report], None]] = {
    "memserve": memserve,
    "memserve-designs": memserve_designs,
    **{part: functools.partial(symphony, model=model) for part, model in SYMPHONYS_MODELS.items()},
    "kvdirect": kvdirect,
    "kvdirect-own": functools.partial(kvdirect, step_s=KVDIRECTS_STEP_S),
}


def main(argv: Sequence[str] | None = None) -> int:
    options = PapersOptions.of(argv, NAME, __doc__)
    report = Report(NAME)
    for part in options.parts:
        PARTS[part](options, report)
    report.note("simulated with estimated costs; compare ratios")
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
