from __future__ import annotations

import pytest

from shared.settings import BadSetting, Settings, parse_settings
from shared.simulation import Simulation
from shared.types import ServiceName


def test_what_is_not_named_keeps_its_default() -> None:
    assert Simulation.parse("base=0.005,prefill=1e-5,decode=0.0001,end=0.01") == Simulation(
        0.005, 1e-5, 0.0001, 0.01
    )
    assert Simulation.parse("prefill=0.00001") == Simulation(prefill=0.00001)


def test_costs_add_up() -> None:
    simulation = Simulation(base=1.0, prefill=0.25, decode=0.5)
    assert simulation.seconds(prefill_tokens=0, decode_rows=0) == 1.0
    assert simulation.seconds(prefill_tokens=4, decode_rows=3) == 3.5


@pytest.mark.parametrize(
    "text",
    (
        *("", "base", "base=", "base=x", "base=-1", "base=nan", "decode=inf", "end=1.5"),
        *("speed=1", "base=1,base=1", "base=1,", "base=1 prefill=2"),
    ),
)
def test_bad_values_are_named_on_one_line(text: str) -> None:
    with pytest.raises(BadSetting, match=r"\A--sim: .*\Z"):
        parse_settings(None, ["--device=simulated", f"--sim={text}"], {})


def test_it_needs_the_device_and_reaches_the_executor() -> None:
    with pytest.raises(BadSetting, match="needs --device simulated"):
        Settings(sim="base=1")
    settings = Settings(device="simulated", sim="base=1")
    flags = settings.to_flags(ServiceName.MODEL_EXECUTOR)
    assert parse_settings(ServiceName.MODEL_EXECUTOR, flags, {}) == settings
