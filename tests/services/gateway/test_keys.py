"""API keys from a file: its form, its changes, and who may come in by it."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

import httpx
import pytest
import structlog

from services.gateway import watched
from services.gateway.keys import ApiKeys, BadKeyFile
from shared.messages import Generate
from shared.types import EXIT_BAD_SETTING
from tests.services.gateway.scripted_mesh import ScriptedMesh, background, until, wait_ready

SECRETS = ("sk-alpha-1", "sk:beta/2", "gamma", "sk-own-3")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# of the department\n\n  sk-alpha-1\nbeta.team: sk:beta/2\n")
    return path


def replace_file(path: Path, text: str) -> None:
    """As careful programs do, so that nobody reads half of it."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, path)


def test_keys_have_names(file: Path) -> None:
    known = ApiKeys(["sk-own-3"], str(file))
    assert known
    assert known.name_of(b"sk-own-3") == "key0"
    assert known.name_of(b"sk:beta/2") == "beta.team"
    unnamed = known.name_of(b"sk-alpha-1")
    assert unnamed is not None and unnamed.startswith("key-") and "alpha" not in unnamed
    replace_file(file, "first\nsk-alpha-1")
    known.refresh()
    assert known.name_of(b"sk-alpha-1") == unnamed  # wherever it stands
    for wrong in (b"", b"sk", b"sk-alpha-1 ", b"SK-ALPHA-1", b"beta.team: sk:beta/2", b"\xff"):
        assert known.name_of(wrong) is None
    assert not ApiKeys()


def test_every_key_is_compared_in_constant_time(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ApiKeys(["sk-own-3"], str(file))
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def watched_compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", watched_compare)
    for sent in (b"sk-own-3", b"x", b"sk-alpha-1"):
        known.name_of(sent)
    assert compared == [(32, 32)] * 9


@pytest.mark.parametrize(
    "text", ["", "# none\n\n", "two words\n", "k\u00e9y\n", "a\x00b\n", "a: b c"]
)
def test_what_is_no_file_of_keys_is_refused_without_quoting_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(BadKeyFile) as refusal:
        ApiKeys([], str(path))
    assert str(path) in str(refusal.value)
    assert not any(word in str(refusal.value) for word in ("two", "words", "b c", "none"))


def test_a_file_that_breaks_changes_nothing(file: Path) -> None:
    known = ApiKeys([], str(file))
    with structlog.testing.capture_logs() as logs:
        for text in ("", "two words"):
            replace_file(file, text)
            for _ in range(3):
                known.refresh()
                assert known.name_of(b"sk-alpha-1") is not None
        file.unlink()
        for _ in range(3):
            known.refresh()
            assert known.name_of(b"sk-alpha-1") is not None
        replace_file(file, "gamma")
        known.refresh()
    assert known.name_of(b"sk-alpha-1") is None
    assert known.name_of(b"gamma") is not None
    assert [log["log_level"] for log in logs] == ["error"] * 3 + ["info"]  # each is told once
    assert not any(secret in str(logs) for secret in SECRETS)


async def test_a_gateway_takes_over_new_keys(
    mesh: ScriptedMesh, tiny_model: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "LOOK_SECONDS", 0.02)
    url = await mesh.start_gateway(tiny_model, api_key_file=str(file), api_key=["sk-own-3"])
    await mesh.start_all()
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        await wait_ready(client)

        async def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (await client.get("/v1/models", headers=headers)).status_code

        assert [await status(key) for key in SECRETS] == [200, 200, 401, 200]
        body = {"prompt": "hi", "max_tokens": 1}
        posted = client.post("/v1/completions", json=body, headers={"x-api-key": "sk:beta/2"})
        async with background(posted):
            assert (await mesh.tokenizer.hear(Generate)).tenant == "beta.team"
        replace_file(file, "gamma")
        while await status("gamma") != 200:
            pass
        assert [await status(key) for key in SECRETS] == [401, 401, 200, 200]


async def test_a_gateway_without_its_keys_does_not_start(
    mesh: ScriptedMesh, tiny_model: Path, tmp_path: Path
) -> None:
    with structlog.testing.capture_logs() as logs, pytest.raises(IndexError):
        await mesh.start_gateway(tiny_model, api_key_file=str(tmp_path / "nowhere"))
    await until(mesh.ended)
    assert mesh._tasks[0].result() == EXIT_BAD_SETTING
    [error] = [log for log in logs if log["log_level"] == "error"]
    assert "--api-key-file" in error["reason"] and "nowhere" in error["reason"]
