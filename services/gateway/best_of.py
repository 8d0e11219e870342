"""Which samples of a prompt are answered, if more were drawn than asked for."""

from __future__ import annotations

from services.gateway.request import GenerationRequest
from services.gateway.shape import Answer


def best_of(answers: list[Answer], request: GenerationRequest) -> list[Answer]:
    """Of each prompt's samples the `n` likeliest, the best first."""
    if request.samples == request.n:
        return answers
    groups = range(0, len(answers), request.samples)
    ranked = (
        sorted(answers[at : at + request.samples], key=_mean_logprob, reverse=True) for at in groups
    )
    return [answer for group in ranked for answer in group[: request.n]]


def _mean_logprob(answer: Answer) -> float:
    """Of its tokens, so that no length is favoured."""
    found = [
        token.logprob
        for token in answer.tokens
        if token.logprob is not None and token.position >= answer.prompt_tokens
    ]
    return sum(found) / len(found) if found else 0.0
