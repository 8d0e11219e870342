"""How tokens and their log-probabilities are written in answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from services.gateway.tokens import Alternative, Token

Name: TypeAlias = Callable[[int, bytes], str]  # of a token, by its id and bytes
LIKELIEST = 1  # the rank of the first alternative


def as_id(token_id: int, piece: bytes) -> str:
    return f"token_id:{token_id}"


def as_text(token_id: int, piece: bytes) -> str:
    """Parts of characters become U+FFFD."""
    return piece.decode("utf-8", "replace")


def as_key(token_id: int, piece: bytes) -> str:
    """Unlike texts, keys tell parts of characters apart."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def chat_logprobs(tokens: Iterable[Token], top: int, name: Name) -> dict[str, Any]:
    """As in OpenAI's chat completions, with so many alternatives."""

    def entry(one: Token | Alternative) -> dict[str, Any]:
        return {
            "token": name(one.id, one.piece),
            "logprob": one.logprob,
            "bytes": list(one.piece),
        }

    content = [entry(one) | {"top_logprobs": list(map(entry, one.top[:top]))} for one in tokens]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: list[Token], top: int, name: Name) -> dict[str, Any]:
    """As in OpenAI's completions: the token itself, and so many alternatives."""

    def likeliest(token: Token) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        own = {name(token.id, token.piece): token.logprob}
        others = {name(one.id, one.piece): one.logprob for one in token.top[:top]}
        return own | others | own  # it comes first, and wins over one that reads alike

    return {
        "tokens": [name(token.id, token.piece) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": list(map(likeliest, tokens)),
        "text_offset": [token.text_offset for token in tokens],
    }


def prompt_logprobs(tokens: Iterable[Token], top: int) -> list[dict[str, Any] | None]:
    """As vLLM: by id, the token itself and so many alternatives."""
    return [None if token.logprob is None else _by_id(token, top) for token in tokens]


def _by_id(token: Token, top: int) -> dict[str, Any]:
    ranked: list[tuple[int, Token | Alternative]] = [(token.rank, token)]
    ranked += enumerate(token.top[:top], LIKELIEST)
    return {
        str(one.id): {
            "logprob": one.logprob,
            "rank": rank,
            "decoded_token": as_text(one.id, one.piece),
        }
        for rank, one in ranked
    }
