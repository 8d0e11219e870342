"""Every knob of Headrace in one dataclass; flags and `HEADRACE_*` variables are made from it.

Flags are named as vLLM names the same thing. A flag wins over its variable, a variable over the
default.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from shared.bounds import MAX_BLOCKS, MAX_SLOTS
from shared.simulation import Simulation
from shared.types import ServiceName

ENV_PREFIX = "HEADRACE_"
MIB = 1024 * 1024
GATEWAY, TOKENIZER, SCHEDULER, MODEL_EXECUTOR, DETOKENIZER = ServiceName
EVERY = tuple(ServiceName)
KINDS = {int: "an integer", float: "a number"}
LAUNCHER = "launcher"  # `headrace serve` takes every setting; these alone concern only it


class BadSetting(Exception):
    """A setting that cannot be used; the text names it."""


def _setting(
    default: Any,
    help: str,
    *scope: str,
    at_least: float | None = None,
    at_most: float | None = None,
    choices: Sequence[str] = (),
    secret: bool = False,
) -> Any:
    metadata = {
        "help": help,
        "scope": scope,
        "at_least": at_least,
        "at_most": at_most,
        "choices": choices,
        "secret": secret,
    }
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings; which services read one stands in its scope."""

    # The model
    model: str = _setting(
        "", "prepared model directory", GATEWAY, TOKENIZER, DETOKENIZER, MODEL_EXECUTOR
    )
    served_model_name: list[str] = _setting([], "names of the model in the API", GATEWAY)
    max_model_len: int | None = _setting(
        None,
        "context length; default: the model's own",
        GATEWAY,
        TOKENIZER,
        MODEL_EXECUTOR,
        at_least=2,
    )
    dtype: str = _setting(
        "auto",
        "type of weights and KV cache",
        MODEL_EXECUTOR,
        choices=("auto", "float32", "bfloat16"),
    )
    seed: int | None = _setting(
        None, "makes the seeds drawn for unseeded requests repeatable", GATEWAY, at_least=0
    )

    # HTTP
    host: str = _setting("127.0.0.1", "address to listen on", GATEWAY)
    port: int = _setting(8000, "port to listen on", GATEWAY, at_least=0, at_most=65535)
    uds: str | None = _setting(None, "unix socket to listen on, instead of host and port", GATEWAY)
    listen_fd: int | None = _setting(
        None, "inherited listening socket, instead of host and port", GATEWAY
    )
    api_key: list[str] = _setting([], "key(s) that clients must send", GATEWAY, secret=True)
    api_key_file: str | None = _setting(
        None,
        "file with such keys, one a line, or 'name: key'; read again when it changes",
        GATEWAY,
    )
    max_body_size: int = _setting(
        4 * MIB,
        "largest request body, bytes",
        GATEWAY,
        at_least=1,
        at_most=15 * MIB,  # whatever it holds still fits into a frame of the mesh
    )
    max_connections: int = _setting(
        4096, "HTTP connections at once, for each gateway", GATEWAY, at_least=1
    )
    request_timeout: float = _setting(
        0.0, "seconds that an answer may take; 0: as long as it needs", GATEWAY, at_least=0
    )
    allowed_origins: list[str] = _setting(
        [], "origins whose web pages may call the API; '*': any", GATEWAY
    )
    ssl_certfile: str | None = _setting(
        None, "certificate chain (PEM): serve HTTPS; read again when it changes", GATEWAY
    )
    ssl_keyfile: str | None = _setting(None, "its private key (PEM)", GATEWAY)
    max_logprobs: int = _setting(
        20,
        "most alternatives to a token that a request may ask for",
        GATEWAY,
        at_least=0,
        at_most=100,
    )
    trust_request_chat_template: bool = _setting(
        False, "render chat templates that come with requests", GATEWAY
    )

    tool_call_parser: str = _setting(
        "auto",
        "how the model writes tool calls; auto: as its chat template shows",
        GATEWAY,
        choices=("auto", "none", "hermes", "llama3_json", "mistral", "pythonic"),
    )
    reasoning_parser: str = _setting(
        "auto",
        "how the model marks its reasoning; auto: as its chat template shows",
        GATEWAY,
        choices=("auto", "none", "qwen3", "deepseek_r1", "mistral", "seed_oss"),
    )

    # Scheduling
    max_queue: int = _setting(1024, "requests waiting beyond those running", SCHEDULER, at_least=0)
    run_ahead: int = _setting(
        1,
        "plans sent before the result of the one before is back",
        SCHEDULER,
        at_least=0,
        at_most=2,
    )
    max_lease: int = _setting(
        64,
        "iterations that the executor may go on decoding without a new plan",
        SCHEDULER,
        at_least=0,
        at_most=1024,
    )
    max_decode_slowdown: float = _setting(
        2.0,
        "how many times as long an iteration may take that reads prompts beside decodes;"
        " inf: no limit",
        SCHEDULER,
        at_least=1,
    )
    enable_prefix_caching: bool = _setting(
        True, "keep the KV of what was computed for prompts that begin alike", SCHEDULER
    )
    max_num_seqs: int = _setting(
        64,
        "sequences running at once",
        SCHEDULER,
        MODEL_EXECUTOR,
        at_least=1,
        at_most=MAX_SLOTS,
    )
    max_num_batched_tokens: int = _setting(
        512, "token budget of one iteration", MODEL_EXECUTOR, at_least=1
    )

    # KV memory and compute
    block_size: int = _setting(16, "tokens in a KV block", MODEL_EXECUTOR, at_least=1, at_most=1024)
    num_gpu_blocks_override: int | None = _setting(
        None,
        "KV blocks, instead of sizing by memory",
        MODEL_EXECUTOR,
        at_least=1,
        at_most=MAX_BLOCKS,
    )
    kv_cache_memory_bytes: int | None = _setting(
        None,
        "memory for the KV cache; default: a share of what is free",
        MODEL_EXECUTOR,
        at_least=1,
    )
    gpu_memory_utilization: float = _setting(
        0.9, "share of accelerator memory to use", MODEL_EXECUTOR, at_least=0.01, at_most=1
    )
    device: str = _setting(
        "auto",
        "where the model runs; simulated: nowhere, the time is spent asleep",
        MODEL_EXECUTOR,
        choices=("auto", "cpu", "cuda", "simulated"),
    )
    sim: str | None = _setting(
        None,
        "seconds of a simulated iteration, such as base=0.02,prefill=0.00001,decode=0",
        MODEL_EXECUTOR,
    )
    cpu_threads: int | None = _setting(
        None,
        "compute threads on the CPU; default: all cores, shared out among the executors",
        MODEL_EXECUTOR,
        at_least=1,
    )

    # The mesh
    mesh: str = _setting("", "ipc:DIRECTORY, dns, or static:SERVICE=HOST:PORT,...", *EVERY)
    index: int = _setting(0, "number of this instance among its service's", *EVERY, at_least=0)
    mesh_host: str = _setting("127.0.0.1", "address the inbox binds over TCP", *EVERY)
    mesh_port: int | None = _setting(
        None,
        "port the inbox binds over TCP; default: the service's own",
        *EVERY,
        at_least=1,
        at_most=65535,
    )
    mesh_keys: str | None = _setting(
        None, "directory with the keys of a mesh over TCP, made by `headrace keys`", *EVERY
    )
    allow_plain_tcp: bool = _setting(
        False, "let the mesh use TCP without encryption or authentication", *EVERY
    )

    # Running
    otlp_traces_endpoint: str | None = _setting(
        None,
        "URL of a collector of OpenTelemetry traces, such as http://collector:4318/v1/traces",
        GATEWAY,
        SCHEDULER,
    )
    drain_timeout: float = _setting(
        30.0, "seconds that running answers may take to finish on SIGTERM", *EVERY, at_least=0
    )
    log_level: str = _setting(
        "info", "least level logged", *EVERY, choices=("debug", "info", "warning", "error")
    )
    log_format: str = _setting(
        "auto",
        "auto: console on a terminal, else json",
        *EVERY,
        choices=("auto", "console", "json"),
    )
    hang_timeout: float = _setting(
        20.0,
        "seconds without a sign of life after which a process is killed; 0: never",
        *EVERY,
        at_least=0,
    )
    iteration_timeout: float = _setting(
        300.0,
        "seconds that one iteration may take before its executor is killed; 0: no limit",
        MODEL_EXECUTOR,
        at_least=0,
    )
    gateways: int = _setting(1, "gateway processes", LAUNCHER, at_least=1)
    tokenizers: int = _setting(1, "tokenizer processes", LAUNCHER, at_least=1)
    schedulers: int = _setting(
        1, "scheduler processes, among which the executors are shared out", LAUNCHER, at_least=1
    )
    executors: int = _setting(
        1,
        "model executor processes on one machine, which share its cores, memory and devices",
        LAUNCHER,
        MODEL_EXECUTOR,
        at_least=1,
    )
    detokenizers: int = _setting(1, "detokenizer processes", LAUNCHER, at_least=1)

    def __post_init__(self) -> None:
        for setting in fields(self):
            _check(setting, getattr(self, setting.name))
        self._check_simulation()
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise BadSetting("--ssl-certfile: needs --ssl-keyfile, and the other way round")

        if not (self.otlp_traces_endpoint or "http://").startswith(("http://", "https://")):
            raise BadSetting(
                f"--otlp-traces-endpoint: {self.otlp_traces_endpoint!r} is no URL of http or https"
            )

    def _check_simulation(self) -> None:
        if self.sim is None:
            return
        if self.device != "simulated":
            raise BadSetting("--sim: needs --device simulated")
        try:
            Simulation.parse(self.sim)
        except ValueError as error:
            raise BadSetting(f"--sim: {error}") from None

    def to_flags(self, service: ServiceName) -> list[str]:
        """The command line that hands this service its settings; secrets stay out of it."""
        words: list[str] = []
        for setting in _of_scope(service):
            value = getattr(self, setting.name)
            if setting.metadata["secret"] or value is None or value == []:
                continue
            flag = flag_of(setting)
            if isinstance(value, bool):
                if value != setting.default:
                    words.append(flag if value else flag.replace("--", "--no-", 1))
            else:  # one word each: a value may begin with a dash
                values = value if isinstance(value, list) else [value]
                words += [f"{flag}={value}" for value in values]
        return words

    def to_environment(self) -> dict[str, str]:
        """The `HEADRACE_*` variables that hand over what must not stand in a process list."""
        return {
            variable_of(setting): ",".join(getattr(self, setting.name))
            for setting in fields(self)
            if setting.metadata["secret"] and getattr(self, setting.name)
        }


def flag_of(setting: Field[Any]) -> str:
    return "--" + setting.name.replace("_", "-")


def variable_of(setting: Field[Any]) -> str:
    return ENV_PREFIX + setting.name.upper()


def parse_settings(
    service: ServiceName | None, words: Sequence[str], environment: Mapping[str, str], **fixed: Any
) -> Settings:
    """Settings of one service (None: of `headrace serve`); raises BadSetting, exits on --help."""
    command = service or "serve"
    settings = [setting for setting in _of_scope(service) if setting.name not in fixed]
    usage = f"headrace {command} {'[MODEL] ' if service is None else ''}[flags]"
    parser = _Parser(prog=f"headrace {command}", usage=usage, allow_abbrev=False)
    hints = get_type_hints(Settings)
    for setting in settings:
        _add_flag(parser, setting, hints[setting.name])
    given = vars(parser.parse_args(list(words)))
    for setting in settings:
        raw = environment.get(variable_of(setting))
        if setting.name not in given and raw:
            given[setting.name] = _from_text(setting, hints[setting.name], raw)
    return Settings(**given, **fixed)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadSetting(message)


def _of_scope(service: ServiceName | None) -> list[Field[Any]]:
    return [
        setting
        for setting in fields(Settings)
        if service is None or service in setting.metadata["scope"]
    ]


def _add_flag(parser: argparse.ArgumentParser, setting: Field[Any], hint: Any) -> None:
    default = setting.default if setting.default not in (None, "") else None
    text = setting.metadata["help"] + (
        f" (default: {default})" if isinstance(default, (int, float, str)) else ""
    )
    options: dict[str, Any] = {"help": text.replace("%", "%%"), "default": argparse.SUPPRESS}
    if hint is bool:
        options["action"] = argparse.BooleanOptionalAction if setting.default else "store_true"
    else:
        options["type"] = lambda raw: _scalar(flag_of(setting), hint, raw)
        options["metavar"] = setting.name.upper()
        if get_origin(hint) is list:
            options |= {"nargs": "+", "action": "extend"}
    parser.add_argument(flag_of(setting), **options)


def _from_text(setting: Field[Any], hint: Any, raw: str) -> Any:
    if hint is bool:
        if raw.lower() not in ("1", "true", "yes", "0", "false", "no"):
            raise BadSetting(f"{variable_of(setting)}: {raw!r} is not yes or no")
        return raw.lower() in ("1", "true", "yes")
    if get_origin(hint) is list:
        return raw.split(",")
    return _scalar(variable_of(setting), hint, raw)


def _scalar(name: str, hint: Any, raw: str) -> Any:
    kinds = [kind for kind in get_args(hint) if kind is not types.NoneType] or [hint]
    try:
        return kinds[0](raw)
    except ValueError:
        raise BadSetting(f"{name}: {raw!r} is not {KINDS[kinds[0]]}") from None


def _check(setting: Field[Any], value: Any) -> None:
    rule = setting.metadata
    if isinstance(value, list):
        _check_list(setting, value)
    if value is None or isinstance(value, (list, bool)):
        return
    if rule["choices"] and value not in rule["choices"]:
        raise BadSetting(f"{flag_of(setting)}: {value!r} is none of {', '.join(rule['choices'])}")
    if rule["at_least"] is not None and not value >= rule["at_least"]:
        raise BadSetting(f"{flag_of(setting)}: {value} is less than {rule['at_least']}")
    if rule["at_most"] is not None and not value <= rule["at_most"]:
        raise BadSetting(f"{flag_of(setting)}: {value} is more than {rule['at_most']}")


def _check_list(setting: Field[Any], values: list[str]) -> None:
    if "" in values:  # as API key it would open the door to everyone
        raise BadSetting(f"{flag_of(setting)}: an empty value")
    if setting.metadata["secret"] and any("," in value for value in values):
        raise BadSetting(f"{flag_of(setting)}: a value with a comma, which separates values")


def model_path(settings: Settings) -> Path:
    """The prepared model directory; raises BadSetting if it was not given or is none."""
    path = Path(settings.model)
    if not settings.model or not (path / "config.json").is_file():
        raise BadSetting(f"--model: {settings.model!r} is not a prepared model directory")
    return path
