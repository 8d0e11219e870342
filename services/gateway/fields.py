"""The fields of OpenAI's and vLLM's requests that are not served, or not by every route.

A field that would change the answer is refused unless it has a value that asks for nothing; a
field that could not change it is ignored, as is one that nobody knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gateway.errors import invalid

# Field -> the values that ask for nothing (null always does).
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # Log-probabilities
    "top_logprobs": (0,),
    "logprob_token_ids": ([],),
    # Sampling
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "thinking_token_budget": (),
    # Constrained output
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "structural_tag": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    # Tools and reasoning
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "web_search_options": (),
    "moderation": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    # Other inputs and outputs
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "prompt_embeds": (),
    "mm_processor_kwargs": ({},),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "spaces_between_special_tokens": (True,),
    "return_token_strs": (False,),
    # Serving
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
}

HARMLESS = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "include_reasoning",
    }
)


def refuse_unsupported(
    extra: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]] = UNSUPPORTED
) -> None:
    """Raises ApiError for a field that asks for what is not served."""
    for name, value in extra.items():
        neutral = unsupported.get(name)
        if neutral is not None and not any(_same(value, other) for other in neutral):
            raise invalid(
                f"{name!r} is not supported here; leave it out.", name, "unsupported_parameter"
            )


def unknown_fields(extra: Mapping[str, Any]) -> list[str]:
    return [name for name in extra if name not in UNSUPPORTED and name not in HARMLESS]


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)
