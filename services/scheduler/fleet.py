"""The executors of one scheduler, and what they can hold together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, KeysView, ValuesView

from services.scheduler.engine import Engine, Options
from services.scheduler.limits import Limits
from services.scheduler.prefix_cache import PrefixCacheStats
from services.scheduler.sequence import Sequence
from shared.messages import Announce, Failure


class Fleet:
    """All of the same model; of the same size or not."""

    def __init__(self, options: Options, max_num_seqs: int) -> None:
        """`max_num_seqs` is that of the executors to come, for as long as there were none."""
        self.cache_stats = PrefixCacheStats()
        self.max_num_seqs_known = max_num_seqs  # of those there are, or were last
        self._options = options
        self._engines: dict[str, Engine] = {}  # by the executor's name
        self._fingerprint: str | None = None
        self._limits: Limits | None = None  # of the largest, while there is one
        self._steps = itertools.count(1)  # of all: a late result never meets its number

    def __len__(self) -> int:
        return len(self._engines)

    def __getitem__(self, name: str) -> Engine:
        return self._engines[name]

    def get(self, name: str) -> Engine | None:
        return self._engines.get(name)

    @property
    def names(self) -> KeysView[str]:
        return self._engines.keys()

    @property
    def engines(self) -> ValuesView[Engine]:
        return self._engines.values()

    @property
    def num_running(self) -> int:
        return sum(len(engine.running) for engine in self.engines)

    @property
    def max_num_seqs(self) -> int:
        return sum(engine.capacity.max_num_seqs for engine in self.engines)

    @property
    def cache_usage(self) -> float:
        """Share of the blocks that are in use, 0 to 1."""
        pools = [engine.planner.pool for engine in self.engines]
        blocks = sum(pool.num_blocks for pool in pools)
        return 1 - sum(pool.num_free for pool in pools) / blocks if blocks else 0.0

    def add(self, name: str, capacity: Announce) -> None:
        """Take an executor; raises ValueError if it has another model than those before."""
        if self._fingerprint not in (None, capacity.fingerprint):
            raise ValueError(
                f"executor has model {capacity.fingerprint}, requests are for {self._fingerprint}"
            )
        self._fingerprint = capacity.fingerprint
        self._engines[name] = Engine(name, capacity, self._options, self._steps, self.cache_stats)
        self._measure()

    def remove(self, name: str) -> Engine | None:
        """What is left of an executor; None if it was not here."""
        engine = self._engines.pop(name, None)
        self._measure()
        return engine

    def fit(self, sequence: Sequence) -> Failure | None:
        """Set how far it may go; or say why it cannot be served, as far as is known."""
        return None if self._limits is None else self._limits.fit(sequence)

    def strand(self, sequences: Iterable[Sequence]) -> set[Sequence]:
        """Those of them for which none is large enough."""
        all_limits = [engine.limits for engine in self.engines]
        return {one for one in sequences if not any(limits.hold(one) for limits in all_limits)}

    def _measure(self) -> None:
        self.max_num_seqs_known = self.max_num_seqs or self.max_num_seqs_known
        self._limits = max((engine.limits for engine in self.engines), key=_size, default=None)


def _size(limits: Limits) -> tuple[int, int]:
    return limits.max_length, limits.max_tokens_held
