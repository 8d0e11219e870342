"""Whether grammars can be followed: asked of a process of its own, and remembered."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, replace

from shared.messages import Failure, Refused, Submit
from shared.model import ModelInfo
from shared.sampling import Grammar

MAX_WAITING = 256  # different grammars, of any size that a frame can hold
MAX_KNOWN = 256
WAIT_SECONDS = 30.0  # for a process that should have ended itself long before
MAX_LINE_BYTES = 64 << 20
MAX_REASON_CHARS = 1000

PARAM = "response_format"
FULL = Failure(503, "Too many grammars wait to be checked.", code="service_unavailable")
TOO_LONG = "it takes too much time to prepare"
TOO_COMPLEX = "it is too complex"
TIME_UP = (-signal.SIGPROF, -signal.SIGKILL)  # by itself, or by us


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of a grammar."""

    reason: str | None  # why it is refused
    converted: str | None = None  # the source to use instead

    def answer(self, request: Submit) -> Submit | Refused:
        if self.reason is not None:
            message = f"Structured output: the grammar or schema cannot be used: {self.reason}"
            failure = Failure(400, message[:MAX_REASON_CHARS], PARAM, "invalid_grammar")
            return Refused(request.request_id, failure)
        if self.converted is None:
            return request
        assert request.params.grammar is not None
        grammar = replace(request.params.grammar, source=self.converted)
        return replace(request, params=replace(request.params, grammar=grammar))


class Grammars:
    """Checks one grammar at a time, each only once; lives on the event loop.

    The process is started for the first grammar, and again when one was too much for it.
    """

    def __init__(self, model: ModelInfo) -> None:
        ends = map(str, sorted(model.eos_token_ids))
        program = (sys.executable, "-m", "services.tokenizer.grammar_check")
        self._command = (*program, str(model.path), str(model.vocab_size), *ends)
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._asked: dict[bytes, asyncio.Task[Verdict]] = {}

    async def check(self, request: Submit) -> Submit | Refused:
        """The answer to a request that has a grammar."""
        grammar = request.params.grammar
        assert grammar is not None
        digest = hashlib.sha256(bytes([grammar.kind]) + grammar.source.encode()).digest()
        verdict = self._known.get(digest)
        if verdict is not None:
            self._known.move_to_end(digest)
            return verdict.answer(request)
        if digest not in self._asked:
            if len(self._asked) >= MAX_WAITING:
                return Refused(request.request_id, FULL)
            self._asked[digest] = asyncio.create_task(self._find_out(digest, grammar))
        verdict = await asyncio.shield(self._asked[digest])  # others may wait for it, too
        return verdict.answer(request)

    async def close(self) -> None:
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)
        await self._end_process()

    async def _find_out(self, digest: bytes, grammar: Grammar) -> Verdict:
        try:
            async with self._turn:
                verdict = await self._ask(grammar)
        finally:
            del self._asked[digest]
        self._known[digest] = verdict
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return verdict

    async def _ask(self, grammar: Grammar) -> Verdict:
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                process = await self._start()
                if isinstance(process, Verdict):
                    return process
                assert process.stdin is not None
                process.stdin.write(json.dumps([grammar.kind, grammar.source]).encode() + b"\n")
                verdict = await _read(process)
        except TimeoutError:
            verdict = None
        if verdict is None:
            code = await self._end_process()
            return Verdict(TOO_COMPLEX if code not in TIME_UP else TOO_LONG)
        unchanged = verdict.converted == grammar.source
        return replace(verdict, converted=None) if unchanged else verdict

    async def _start(self) -> Process | Verdict:
        """The process, or why there can be none."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, limit=MAX_LINE_BYTES
        )
        first = await _read(self._process)
        if first is not None and first.reason is None:
            return self._process
        code = await self._end_process()
        if first is None:
            raise RuntimeError(f"the process that checks grammars does not start: {code}")
        return first

    async def _end_process(self) -> int | None:
        """Returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        with suppress(ProcessLookupError):
            process.kill()
        return await process.wait()


async def _read(process: Process) -> Verdict | None:
    """One line of it; None if it ended."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    return Verdict(*json.loads(line)) if line.endswith(b"\n") else None
