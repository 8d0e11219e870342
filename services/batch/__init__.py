"""Many requests without a server to look after: `headrace batch`, and LLM for Python programs."""

from services.batch.failures import RequestFailed, ServerGone
from services.batch.llm import LLM
from services.batch.results import Result

__all__ = ["LLM", "RequestFailed", "Result", "ServerGone"]
