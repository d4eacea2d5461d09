"""Adopting a model: drop the index and costs of the former one, and load the new one's tokenizer."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable

from sglang_ext.clock import Clock
from sglang_ext.cost_model.model import DEFAULTS
from sglang_ext.errors import DeadlineError, PeerError
from sglang_ext.router.fleet.facts import InstanceFacts
from sglang_ext.router.fleet.fleet import USABLE, Fleet
from sglang_ext.router.fleet.worker import LEARN_TIMEOUT_S, WorkerApi
from sglang_ext.router.index.index import Index
from sglang_ext.router.placing.costs import RouterCosts
from sglang_ext.router.placing.profiles import AUTO, cost_model_for
from sglang_ext.router.tokens.tokenizing import TokenizerService
from sglang_ext.tasks import Rounds, Tasks

logger = logging.getLogger("router.adoption")


class Adoption:
    """Follows the fleet from model to model.

    Args:
        api: asks instances for their tokens, to compare.
        clock: seconds.
        cost_profile: see ``--cost-profile``.
        on_loaded: called when a tokenizer has been loaded.
    """

    def __init__(
        self,
        fleet: Fleet,
        trees: Index,
        costs: RouterCosts,
        tokenizers: TokenizerService,
        api: WorkerApi,
        clock: Clock,
        *,
        cost_profile: str,
        on_loaded: Callable[[], None],
        rounds: Rounds,
    ) -> None:
        self._fleet = fleet
        self._trees = trees
        self._costs = costs
        self._tokenizers = tokenizers
        self._api = api
        self._clock = clock
        self._cost_profile = cost_profile
        self._on_loaded = on_loaded
        self._rounds = rounds
        self._loading: asyncio.Task[None] | None = None
        self._priced: InstanceFacts | None = None
        """The model whose costs are used."""
        self._looked_at: set[tuple[str, int]] = set()
        """Devices and numbers of ranks that were looked at for the costs of the present model."""
        self._pricing = asyncio.Lock()
        self._pricings = Tasks(_log_failure)
        fleet.adopted.subscribe(self._adopt)

    def _adopt(self, facts: InstanceFacts) -> None:
        self._trees.clear()
        self._looked_at.clear()
        if self._loading is not None:
            self._loading.cancel()
        self._loading = self._rounds.start("tokenizer", functools.partial(self._load, facts))

    async def _load(self, facts: InstanceFacts) -> None:
        if self._cost_profile == AUTO:
            await self._price(facts)
        await self._tokenizers.load(facts)
        self._on_loaded()
        if self._tokenizers.tokenizer is None:
            return
        while True:
            for instance in [row for row in self._fleet.rows.values() if row.state in USABLE]:
                theirs = functools.partial(self._api.tokenize, instance.name, timeout_s=LEARN_TIMEOUT_S)
                try:
                    await self._tokenizers.verify(theirs)
                except (PeerError, DeadlineError) as error:
                    logger.warning("cannot compare tokens: %s", error)
                else:
                    return
            await self._clock.sleep(1.0)

    async def _price(self, facts: InstanceFacts) -> None:
        """Choose the costs of a model. Where only defaults are known, a later instance may tell more."""
        async with self._pricing:
            if self._priced is facts and self._costs.basis != DEFAULTS:
                return
            rows = self._fleet.rows.values()
            known = [row.registration for row in rows if row.registration and not row.other_model]
            found = await asyncio.to_thread(cost_model_for, facts.model.name, known)
            if self._fleet.model is facts and (self._priced is not facts or found.basis != DEFAULTS):
                self._priced = facts
                self._costs.use(found)

    def on_reached(self, name: str) -> None:
        """An instance has registered: its device may tell more than the defaults of the model."""
        row, model = self._fleet.rows.get(name), self._fleet.model
        known = None if row is None or row.other_model else row.registration
        if self._cost_profile != AUTO or model is None or known is None or self._costs.basis != DEFAULTS:
            return
        kind = known.device, known.tp_size
        if known.device and kind not in self._looked_at:
            self._looked_at.add(kind)
            self._pricings.start(self._price(model))

    async def loaded(self, timeout_s: float) -> None:
        """Wait for the tokenizer of the model that was taken on, if one was, but no longer than so."""
        if self._loading is not None:
            await asyncio.wait({self._loading}, timeout=timeout_s)

    async def stop(self) -> None:
        """Load no more."""
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        await self._pricings.cancel()


def _log_failure(error: BaseException) -> None:
    logger.error("costs are calculated with defaults", exc_info=error)
