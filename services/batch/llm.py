"""A model for Python programs and notebooks: prompts in, results out, in one call."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, closing
from itertools import repeat
from typing import Any, Self, TypeAlias, overload

from services.batch.background import BackgroundLoop
from services.batch.client import RETRIES, WINDOW, Answer, Client
from services.batch.failures import RequestFailed, ServerGone
from services.batch.in_order import in_order
from services.batch.own_mesh import OwnMesh, own_settings, own_window, quiet, words_of
from services.batch.progress import Progress
from services.batch.results import Result

Params: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | list[int]
Conversation: TypeAlias = list[dict[str, Any]]

RESERVED = frozenset({"prompt", "messages", "stream", "stream_options"})


class LLM:
    """A mesh of one's own, or a running server with `url`; close it, or use it in a `with`.

    `model` is what `headrace serve` takes, or with `url` a name of the server's (default: its
    first). `flags` are those of `headrace serve` under their Python names: `max_num_seqs=32`.
    Raises TypeError, ValueError or BadSetting for what it cannot use, ServerGone if the start
    fails. Everything may be called inside a running event loop, and from several threads.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "",
        *,
        url: str | None = None,
        api_key: str = "",
        window: int | None = None,
        max_retries: int = RETRIES,
        **flags: Any,
    ) -> None:
        self._model = os.fspath(model) if url is not None else ""
        with ExitStack() as stack:
            if url is None:
                words = words_of({"model": os.fspath(model) or None, **flags})
                self._window = window or own_window(own_settings(words))
                mesh = stack.enter_context(OwnMesh(quiet(words)))
                client = Client(
                    mesh.url, window=self._window, retries=max_retries, check=mesh.check
                )
            elif flags:
                raise TypeError(f"{next(iter(flags))!r} is for a mesh of one's own, not for url")
            else:
                self._window = window or WINDOW
                client = Client(url, api_key=api_key, window=self._window, retries=max_retries)
            self._loop = BackgroundLoop()
            stack.callback(self._loop.close)
            self._client = self._loop.run(client.__aenter__())
            stack.callback(_close, self._loop, client)
            self._loop.run(client.wait_ready() if url is None else client.probe())
            self._closer = weakref.finalize(self, stack.pop_all().close)  # at exit, at the latest

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort what still runs, and end the mesh if it is our own."""
        self._closer()

    @overload
    def generate(  # type: ignore[overload-overlap] # a text is an iterable, too
        self,
        prompts: Sequence[Prompt] | Prompt,
        params: Params | Sequence[Params] | None = None,
        *,
        strict: bool = False,
        progress: bool | None = None,
    ) -> list[Result]: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: Params | None = None,
        *,
        strict: bool = False,
        progress: bool | None = None,
    ) -> Iterator[Result]: ...

    def generate(
        self,
        prompts: Any,
        params: Params | Sequence[Params] | None = None,
        *,
        strict: bool = False,
        progress: bool | None = None,
    ) -> list[Result] | Iterator[Result]:
        """Continue each prompt, a text or token ids: POST /v1/completions, with `params`.

        Results are in the order of the prompts, failures in their places as `error`; `strict`
        raises the first of them instead. A list (or a single prompt) gives a list. Any other
        iterable gives an iterator and is read as there is room. `progress` None is: a bar if
        standard error is a terminal.
        """
        single = isinstance(prompts, str) or _are(prompts, int)
        given = [prompts] if single else prompts
        return self._answers("/v1/completions", "prompt", given, params, strict, progress)

    @overload
    def chat(  # type: ignore[overload-overlap]
        self,
        conversations: Sequence[Conversation] | Conversation,
        params: Params | Sequence[Params] | None = None,
        *,
        strict: bool = False,
        progress: bool | None = None,
    ) -> list[Result]: ...

    @overload
    def chat(
        self,
        conversations: Iterable[Conversation],
        params: Params | None = None,
        *,
        strict: bool = False,
        progress: bool | None = None,
    ) -> Iterator[Result]: ...

    def chat(
        self,
        conversations: Any,
        params: Params | Sequence[Params] | None = None,
        *,
        strict: bool = False,
        progress: bool | None = None,
    ) -> list[Result] | Iterator[Result]:
        """The next message of each conversation: POST /v1/chat/completions; else as `generate`."""
        given = [conversations] if _are(conversations, Mapping) else conversations
        return self._answers("/v1/chat/completions", "messages", given, params, strict, progress)

    def _answers(
        self,
        path: str,
        field: str,
        given: Iterable[Any],
        params: Params | Sequence[Params] | None,
        strict: bool,
        progress: bool | None,
    ) -> list[Result] | Iterator[Result]:
        if not self._closer.alive:
            raise ValueError("this LLM is closed")
        total = len(given) if isinstance(given, Sequence) else None
        bodies = zip(given, _for_each(params, total), strict=False)
        results = self._results(path, field, bodies, Progress(total, progress), strict)
        return results if total is None else list(results)

    def _results(
        self,
        path: str,
        field: str,
        bodies: Iterable[tuple[Any, Params]],
        progress: Progress,
        strict: bool,
    ) -> Iterator[Result]:
        def start(body: tuple[Any, Params]) -> Future[Answer]:
            prompt, params = body
            model = {"model": self._model} if self._model else {}
            content = json.dumps({**model, field: prompt, **params}).encode()
            return self._loop.submit(self._client.ask(path, content))

        def ended(future: Future[Answer]) -> None:
            progress.ended(None if future.exception() else future.result())

        answers = in_order(bodies, start, self._window, ended)
        with progress, closing(answers):
            for (prompt, _), future in answers:
                result = _result(prompt, future)
                if strict and result.error:
                    raise result.error
                yield result
            progress.finish()


def _close(loop: BackgroundLoop, client: Client) -> None:
    loop.run(client.__aexit__())


def _are(values: Any, kind: type) -> bool:
    """Whether it is a list of these, and so stands for a single prompt or conversation."""
    return isinstance(values, list) and bool(values) and isinstance(values[0], kind)


def _for_each(params: Params | Sequence[Params] | None, total: int | None) -> Iterable[Params]:
    """Parameters for each prompt; raises ValueError or TypeError before anything is asked."""
    if params is None or isinstance(params, Mapping):
        _check(params or {})
        return repeat(params or {})
    if total is None:
        raise ValueError("a list of params needs a list of prompts")
    if len(params) != total:
        raise ValueError(f"{len(params)} params for {total} prompts")
    for one in params:
        _check(one)
    return params


def _check(params: Params) -> None:
    json.dumps(params)
    if wrong := RESERVED & params.keys():
        raise ValueError(f"params: {', '.join(sorted(wrong))} cannot be set here")


def _result(prompt: Any, future: Future[Answer]) -> Result:
    """Raises ServerGone if the server, rather than the request, is at fault."""
    try:
        answer = future.result()
    except RequestFailed as error:
        return Result(prompt, None, error)
    except CancelledError:
        raise ServerGone("the LLM was closed") from None
    if answer.failure:
        return Result(prompt, None, answer.failure)
    return Result(prompt, answer.body, None)
