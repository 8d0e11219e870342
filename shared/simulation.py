"""What an iteration of the simulated accelerator takes, as `--sim` says it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Simulation:
    """Costs in seconds; raises ValueError if one is negative, infinite or no number."""

    base: float = 0.02  # of every iteration
    prefill: float = 0.0  # of each prompt token computed
    decode: float = 0.0  # of each sequence that gets its next token
    end: float = 0.0  # chance, 0 to 1, that a token ends its sequence

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name}={value} is not 0 or more")
        if self.end > 1:
            raise ValueError(f"end={self.end} is more than 1")

    @classmethod
    def parse(cls, text: str) -> Simulation:
        """Of e.g. `base=0.02,prefill=0.00001`; what is not named keeps its default."""
        names = [field.name for field in fields(cls)]
        values: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            if name not in names or name in values:
                raise ValueError(f"{part!r} is none of {'=N, '.join(names)}=N, each once")
            try:
                values[name] = float(value)
            except ValueError:
                raise ValueError(f"{part!r} has no number") from None
        return cls(**values)

    def seconds(self, prefill_tokens: int, decode_rows: int) -> float:
        """How long an iteration takes."""
        return self.base + self.prefill * prefill_tokens + self.decode * decode_rows
