"""The containers at rest: built, started, looked at, asked, and stopped."""

from __future__ import annotations

import time
from threading import Thread

import httpx
from checklist import CheckFailed
from load import QUESTIONS, Outcome, ask
from stack import CORE, EXECUTOR, Stack

from services.launcher.models import ModelError, prepare_model

TOKENS = 24  # of an answer
CROWD = 24  # prompts of one request
SERVICES = ("gateway", "tokenizer", "scheduler", "executor", "detokenizer")
WORK = {  # what shows in each service's trace that it has its part of the work
    "tokenizer": "Generate",
    "model-executor": "iteration",
    "detokenizer": "Open",
}


class Containers:
    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.expected: dict[str, str] = {}  # the answer to each question

    def build(self) -> str:
        for target, image in (("core", CORE), ("executor", EXECUTOR)):
            self.stack.docker.build(target, image)
        size = "{{.Size}}"
        sizes = [
            f"{image} {int(self.stack.docker('image', 'inspect', '-f', size, image)) / 1e6:.0f} MB"
            for image in (CORE, EXECUTOR)
        ]
        return ", ".join(sizes)

    def start(self, **scale: int) -> str:
        try:
            self.stack.fill_models(prepare_model("", print).name)
        except ModelError as error:
            print(f"the containers fetch the model themselves: {error}")
        self.stack.up(**scale)
        self.stack.wait_whole()
        return f"whole and ready: {dict(self.stack.instances())}"

    def hardened(self) -> str:
        for service in SERVICES:
            for container in self.stack.containers(service).values():
                self._hardened(container)
        [tokenizer, *_] = self.stack.containers("tokenizer").values()
        key = self.stack.docker("exec", tokenizer, "stat", "-c", "%a %u", "/keys/mesh.key_secret")
        if key.split() != ["600", "10001"]:
            raise CheckFailed(f"mode and owner of the mesh's key: {key}")
        return "all as a user without capabilities on a read-only root; the key is its user's alone"

    def _hardened(self, container: str) -> None:
        state = self.stack.inspect(container)
        host = state["HostConfig"]
        good = (
            host["ReadonlyRootfs"]
            and host["CapDrop"] == ["ALL"]
            and any("no-new-privileges" in option for option in host["SecurityOpt"])
        )
        user = self.stack.docker("exec", container, "id", "-u").strip()
        capabilities = self.stack.docker("exec", container, "grep", "CapEff", "/proc/1/status")
        try:
            self.stack.docker("exec", container, "touch", "/app/written")
            good = False
        except CheckFailed:
            pass  # as it should be
        if not good or user != "10001" or int(capabilities.split()[1], 16):
            raise CheckFailed(f"{state['Name']}: user {user}, {capabilities.strip()}, {host}")

    def chat(self) -> str:
        for question in QUESTIONS:
            outcome = ask(self.stack.url, question, TOKENS)
            if outcome.kind != "right" or not outcome.text:
                raise CheckFailed(f"{outcome.kind}: {outcome.text}")
            self.expected[question] = outcome.text
        return f"{QUESTIONS[0]}: {self.expected[QUESTIONS[0]]!r}"

    def traced(self) -> str:
        """The gateway has what it takes to tell OpenTelemetry collectors."""
        [gateway, *_] = self.stack.containers("gateway").values()
        self.stack.docker("exec", gateway, "python3", "-c", "import services.gateway.spans")
        return "OpenTelemetry is in the image"

    def spread(self) -> str:
        """Every tokenizer, executor and detokenizer gets its part of a crowd."""
        crowd = [f"Of the {number} wheels, the" for number in range(CROWD)]
        body = {"prompt": crowd, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.stack.url}/v1/completions", json=body, timeout=120)
        if answer.status_code != 200 or len(answer.json()["choices"]) != CROWD:
            raise CheckFailed(f"{answer.status_code}: {answer.text[:300]}")
        events = self.stack.events(60)
        shares = {
            service: [count[what] for (kind, _), count in events.items() if kind == service]
            for service, what in WORK.items()
        }
        if not all(all(counts) for counts in shares.values()):
            raise CheckFailed(f"an instance had nothing to do: {shares}")
        return f"by instance: {shares}"

    def drain(self) -> str:
        """Stopped amid an answer, the mesh finishes it first."""
        answers: list[Outcome] = []
        question = QUESTIONS[0]
        client = Thread(target=lambda: answers.append(ask(self.stack.url, question, 3 * TOKENS)))
        client.start()
        time.sleep(1.0)
        began = time.monotonic()
        self.stack.compose("stop")
        client.join()
        if answers[0].kind != "right":
            raise CheckFailed(f"the answer was {answers[0]}")
        codes = self._exit_codes()
        if set(codes.values()) != {0}:
            raise CheckFailed(f"exit codes {codes}")
        took = time.monotonic() - began
        return f"the answer came whole; all ended with code 0 after {took:.0f} s"

    def _exit_codes(self) -> dict[str, int]:
        found = [self.stack.inspect(one) for one in self.stack.compose("ps", "-aq").split()]
        return {one["Name"]: one["State"]["ExitCode"] for one in found}
