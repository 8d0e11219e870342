"""Where a model's reasoning stands when its answer begins: that is for its chat template to say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from itertools import islice
from typing import Any

from services.gateway.parsing.reasoning import Marks
from shared.chat_template import ChatError, ChatTemplate

THINK = Marks("<think>", "</think>")
REASONING_MARKS = {
    "qwen3": THINK,
    "deepseek_r1": THINK,
    "mistral": Marks("[THINK]", "[/THINK]"),
    "seed_oss": Marks("<seed:think>", "</seed:think>"),
}
UNSAID = frozenset({"deepseek_r1"})  # it thinks at once, whether or not it says so
PROBE = [{"role": "user", "content": "x"}]
KEPT_STATES = 64
MAX_VARIABLES, MAX_VARIABLE_CHARS = 16, 40  # that could matter


class Thinking(Enum):
    BEGUN = auto()  # in the prompt
    POSSIBLE = auto()
    OVER = auto()


def reasoning_marks(name: str, template: str) -> Marks | None:
    """By the setting's name, or as they stand in the template's source."""
    if name != "auto":
        return REASONING_MARKS.get(name)
    return next((marks for marks in REASONING_MARKS.values() if marks.close in template), None)


@dataclass(frozen=True, slots=True)
class Thoughts:
    """A model that thinks."""

    marks: Marks
    template: ChatTemplate
    unsaid: bool  # it begins without the mark
    _states: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_states", lru_cache(KEPT_STATES)(self._state))

    def at_start(self, variables: Mapping[str, Any]) -> Thinking:
        """What the generation prompt leaves, for a template that is given these."""
        short = (pair for pair in variables.items() if _is_short(*pair))
        known = json.dumps(dict(islice(short, MAX_VARIABLES)), sort_keys=True)
        state: Thinking = self._states(known)
        return state

    def in_text(self, text: str) -> Thinking:
        """What a message leaves that is to be continued."""
        begun = text.rfind(self.marks.open) > text.rfind(self.marks.close)
        return Thinking.BEGUN if begun else Thinking.OVER

    def _state(self, variables: str) -> Thinking:
        chat = {**json.loads(variables), "messages": PROBE, "add_generation_prompt": True}
        try:
            prompt = self.template.render(json.dumps(chat)).rstrip()
        except ChatError:
            prompt = ""
        if prompt.endswith(self.marks.close):
            return Thinking.OVER
        begun = self.unsaid or prompt.endswith(self.marks.open)
        return Thinking.BEGUN if begun else Thinking.POSSIBLE


def _is_short(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return len(name) <= MAX_VARIABLE_CHARS
    return isinstance(value, str) and len(name) + len(value) <= MAX_VARIABLE_CHARS
