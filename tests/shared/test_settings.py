from __future__ import annotations

from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.settings import (
    LAUNCHER,
    BadSetting,
    Settings,
    flag_of,
    model_path,
    parse_settings,
    variable_of,
)
from shared.types import ServiceName

GATEWAY = ServiceName.GATEWAY
EXECUTOR = ServiceName.MODEL_EXECUTOR
ALL = fields(Settings)
HINTS = get_type_hints(Settings)


def parse(*words: str, service: ServiceName | None = None, **environment: str) -> Settings:
    return parse_settings(service, words, environment)


def words_for(text: str) -> st.SearchStrategy[Any]:
    """Values of a setting's type that keep its own bounds."""
    setting = next(setting for setting in ALL if setting.name == text)
    rule, hint = setting.metadata, HINTS[text]
    plain = st.text(min_size=1, max_size=12).filter(lambda word: word != "--")
    if rule["choices"]:
        return st.sampled_from(rule["choices"])
    if hint is bool:
        return st.booleans()
    if hint == list[str]:
        return st.lists(plain, max_size=3)
    if float in (hint, *get_args(hint)):
        return st.floats(rule["at_least"], rule["at_most"] or 1e9)
    if int in (hint, *get_args(hint)):
        low = 0 if rule["at_least"] is None else rule["at_least"]
        return st.integers(low, rule["at_most"] or 10**9)
    return plain.map("http://{}".format) if text == "otlp_traces_endpoint" else plain


any_settings = st.builds(  # `sim` has a form of its own
    Settings,
    **{s.name: words_for(s.name) for s in ALL if not s.metadata["secret"] and s.name != "sim"},
)


def test_defaults_alone_are_valid() -> None:
    assert parse() == Settings()
    assert (Settings().port, Settings().host) == (8000, "127.0.0.1")


def test_a_flag_wins_over_its_variable_and_a_variable_over_the_default() -> None:
    assert parse(HEADRACE_PORT="9001").port == 9001
    assert parse("--port", "9002", HEADRACE_PORT="9001").port == 9002
    assert parse("--port", "8000", HEADRACE_PORT="9001").port == 8000  # equal to the default


def test_an_empty_variable_counts_as_not_set() -> None:
    assert parse(HEADRACE_PORT="", HEADRACE_API_KEY="") == Settings()


def test_variables_of_other_services_are_ignored() -> None:
    assert parse(service=EXECUTOR, HEADRACE_PORT="no port", HEADRACE_DTYPE="float32") == Settings(
        dtype="float32"
    )


@pytest.mark.parametrize(("text", "value"), [("1", True), ("Yes", True), ("false", False)])
def test_switches_are_read_from_variables(text: str, value: bool) -> None:
    assert parse(HEADRACE_ALLOW_PLAIN_TCP=text).allow_plain_tcp is value
    assert parse("--allow-plain-tcp", HEADRACE_ALLOW_PLAIN_TCP=text).allow_plain_tcp


def test_a_switch_that_is_on_can_be_put_off() -> None:
    assert parse().enable_prefix_caching
    assert parse("--enable-prefix-caching", HEADRACE_ENABLE_PREFIX_CACHING="no") == Settings()
    assert not parse("--no-enable-prefix-caching").enable_prefix_caching
    assert not parse(HEADRACE_ENABLE_PREFIX_CACHING="0").enable_prefix_caching


def test_lists_take_several_words_repeated_flags_and_commas() -> None:
    both = ["a", "b"]
    assert parse("--served-model-name", "a", "b").served_model_name == both
    assert parse("--served-model-name", "a", "--served-model-name=b").served_model_name == both
    assert parse(HEADRACE_SERVED_MODEL_NAME="a,b").served_model_name == both
    assert parse("--api-key", "a", HEADRACE_API_KEY="b,c").api_key == ["a"]


@given(any_settings, st.sampled_from(ServiceName))
def test_flags_hand_a_service_all_that_concerns_it(whole: Settings, service: ServiceName) -> None:
    parsed = parse_settings(service, whole.to_flags(service), {})
    for setting in ALL:
        handed_over = service in setting.metadata["scope"] and not setting.metadata["secret"]
        expected = whole if handed_over else Settings()
        assert getattr(parsed, setting.name) == getattr(expected, setting.name), setting.name


@given(
    st.lists(
        st.text(st.characters(exclude_characters=",\0", codec="utf-8"), min_size=1), max_size=3
    )
)
def test_secrets_travel_by_environment_only(keys: list[str]) -> None:
    whole = Settings(api_key=keys)
    for service in ServiceName:
        assert not any("api-key" in word for word in whole.to_flags(service))
    environment = whole.to_environment()
    assert set(environment) <= {"HEADRACE_API_KEY"}
    assert parse_settings(GATEWAY, whole.to_flags(GATEWAY), environment).api_key == keys


@pytest.mark.parametrize("keys", [[""], ["a", ""], ["a,b"], [","]])
def test_a_key_that_would_change_on_its_way_is_refused(keys: list[str]) -> None:
    with pytest.raises(BadSetting, match=r"^--api-key: "):
        Settings(api_key=keys)


@pytest.mark.parametrize(
    ("words", "environment", "line"),
    [
        (["--port", "x"], {}, "--port: 'x' is not an integer"),
        (["--port"], {}, "argument --port: expected one argument"),
        (["--port", "65536"], {}, "--port: 65536 is more than 65535"),
        (["--max-num-seqs", "0"], {}, "--max-num-seqs: 0 is less than 1"),
        (["--max-num-seqs", "1.5"], {}, "--max-num-seqs: '1.5' is not an integer"),
        (["--drain-timeout", "soon"], {}, "--drain-timeout: 'soon' is not a number"),
        (["--drain-timeout", "nan"], {}, "--drain-timeout: nan is less than 0"),
        (["--gpu-memory-utilization", "1.1"], {}, "--gpu-memory-utilization: 1.1 is more than 1"),
        (["--dtype", "int4"], {}, "--dtype: 'int4' is none of auto, float32, bfloat16"),
        (
            ["--otlp-traces-endpoint", "grpc://x:4317"],
            {},
            "--otlp-traces-endpoint: 'grpc://x:4317' is no URL of http or https",
        ),
        (["--quantum", "1"], {}, "unrecognized arguments: --quantum 1"),
        (["--por", "1"], {}, "unrecognized arguments: --por 1"),
        (["stray"], {}, "unrecognized arguments: stray"),
        (["--api-key", ""], {}, "--api-key: an empty value"),
        ([], {"HEADRACE_API_KEY": "a,,b"}, "--api-key: an empty value"),
        ([], {"HEADRACE_API_KEY": ","}, "--api-key: an empty value"),
        (["--api-key", "a,b"], {}, "--api-key: a value with a comma, which separates values"),
        ([], {"HEADRACE_PORT": "x"}, "HEADRACE_PORT: 'x' is not an integer"),
        ([], {"HEADRACE_PORT": "-1"}, "--port: -1 is less than 0"),
        (
            [],
            {"HEADRACE_ALLOW_PLAIN_TCP": "maybe"},
            "HEADRACE_ALLOW_PLAIN_TCP: 'maybe' is not yes or no",
        ),
    ],
)
def test_each_mistake_gets_one_clear_line(
    words: list[str], environment: dict[str, str], line: str
) -> None:
    with pytest.raises(BadSetting) as refusal:
        parse_settings(None, words, environment)
    assert str(refusal.value) == line


def test_a_flag_of_another_service_is_unknown() -> None:
    with pytest.raises(BadSetting, match=r"unrecognized arguments: --max-queue=3"):
        parse("--max-queue=3", service=GATEWAY)
    assert parse("--max-queue=3", service=ServiceName.SCHEDULER).max_queue == 3


def test_fixed_settings_are_no_flags() -> None:
    assert parse_settings(None, [], {"HEADRACE_INDEX": "4"}, index=2).index == 2
    with pytest.raises(BadSetting, match="unrecognized"):
        parse_settings(None, ["--index", "4"], {}, index=2)


def test_settings_of_code_are_checked_too() -> None:
    with pytest.raises(BadSetting, match="--index: -1 is less than 0"):
        replace(Settings(), index=-1)


@pytest.mark.parametrize("setting", ALL, ids=lambda setting: setting.name)
def test_each_setting_has_help_a_flag_a_variable_and_a_reader(setting: Field[Any]) -> None:
    assert setting.metadata["help"].strip()
    assert flag_of(setting).startswith("--") and "_" not in flag_of(setting)
    assert variable_of(setting) == f"HEADRACE_{setting.name.upper()}"
    assert setting.metadata["scope"]
    assert set(setting.metadata["scope"]) <= {*ServiceName, LAUNCHER}


@pytest.mark.parametrize("service", [None, *ServiceName])
def test_help_lists_each_setting(
    service: ServiceName | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse("--help", service=service)
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for setting in ALL:
        if service is None or service in setting.metadata["scope"]:
            assert flag_of(setting) in text
            assert " ".join(setting.metadata["help"].split()[:3]) in text


def test_the_model_must_be_a_prepared_directory(tmp_path: Path) -> None:
    for model in ("", str(tmp_path), str(tmp_path / "none")):
        with pytest.raises(BadSetting, match=r"^--model: .*not a prepared model directory$"):
            model_path(Settings(model=model))
    (tmp_path / "config.json").write_text("{}")
    assert model_path(Settings(model=str(tmp_path))) == tmp_path
