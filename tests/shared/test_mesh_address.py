from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.mesh import MeshAddress
from shared.mesh.curve import MeshKeys, make_keys
from shared.mesh.resolver import IPC_PATH_LIMIT, Dns
from shared.settings import BadSetting, Settings
from shared.types import ServiceName

SCHEDULER = ServiceName.SCHEDULER


def address(mesh: str, service: ServiceName = SCHEDULER, **settings: int | str) -> MeshAddress:
    whole = {"mesh": mesh, "allow_plain_tcp": True} | settings
    return MeshAddress.from_settings(service, Settings(**whole))  # type: ignore[arg-type]


def test_an_ipc_instance_is_named_by_its_index(run_directory: Path) -> None:
    own = address(f"ipc:{run_directory}", index=3)
    assert own.name == "scheduler.3"
    assert own.bind == f"ipc://{run_directory}/scheduler.3.sock"


async def test_an_ipc_directory_is_its_own_registry(run_directory: Path) -> None:
    for name in ("scheduler.0.sock", "scheduler.12.sock", "tokenizer.0.sock", "detokenizer.0.sock"):
        (run_directory / name).touch()
    resolver = address(f"ipc:{run_directory}").resolver
    assert sorted(await resolver.resolve(SCHEDULER)) == ["scheduler.0", "scheduler.12"]
    assert list(await resolver.resolve(ServiceName.TOKENIZER)) == ["tokenizer.0"]


async def test_a_directory_that_vanished_has_nobody_in_it(run_directory: Path) -> None:
    directory = run_directory / "mesh"
    directory.mkdir()
    resolver = address(f"ipc:{directory}").resolver
    directory.rmdir()
    assert await resolver.resolve(SCHEDULER) == {}


def test_a_path_that_no_socket_can_have_is_refused(run_directory: Path) -> None:
    room = IPC_PATH_LIMIT - len(f"{run_directory}//scheduler.0.sock")
    for excess in (0, 1):
        deep = run_directory / ("d" * (room + excess))
        deep.mkdir()
        if excess:
            with pytest.raises(BadSetting, match="over 107 bytes"):
                address(f"ipc:{deep}")
        else:
            assert len(address(f"ipc:{deep}").bind) == len("ipc://") + IPC_PATH_LIMIT


async def test_a_static_list_names_hosts_and_ports() -> None:
    own = address("static:scheduler=127.0.0.1:7103,tokenizer=10.0.0.1:1,tokenizer=10.0.0.2:1")
    assert (own.name, own.bind) == ("127.0.0.1:7103", "tcp://127.0.0.1:7103")
    found = await own.resolver.resolve(ServiceName.TOKENIZER)
    assert found == {"10.0.0.1:1": "tcp://10.0.0.1:1", "10.0.0.2:1": "tcp://10.0.0.2:1"}
    assert await own.resolver.resolve(ServiceName.GATEWAY) == {}


def test_dns_may_have_a_domain() -> None:
    own = address("dns")
    assert (own.bind, own.resolver) == ("tcp://127.0.0.1:7103", Dns(""))
    assert address("dns:mesh.svc").resolver == Dns(".mesh.svc")


def test_an_inbox_on_all_interfaces_is_known_by_the_hosts_address() -> None:
    own = address("dns", mesh_host="0.0.0.0", mesh_port=7200)
    assert own.bind == "tcp://0.0.0.0:7200"
    assert own.name.endswith(":7200")
    assert not own.name.startswith("0.0.0.0")


@pytest.mark.parametrize(
    ("mesh", "line"),
    [
        ("", "--mesh: give ipc:DIRECTORY, dns or static:SERVICE=HOST:PORT,..."),
        ("ipc", "--mesh: give ipc:DIRECTORY, dns or static:SERVICE=HOST:PORT,..."),
        ("ipc:", "--mesh: give ipc:DIRECTORY, dns or static:SERVICE=HOST:PORT,..."),
        ("tcp://127.0.0.1:1", "--mesh: give ipc:DIRECTORY, dns or static:SERVICE=HOST:PORT,..."),
        ("ipc:/no/such/directory", "--mesh: no directory /no/such/directory"),
        ("static:router=h:1", "--mesh: 'router=h:1' is not SERVICE=HOST:PORT"),
        ("static:scheduler", "--mesh: 'scheduler' is not SERVICE=HOST:PORT"),
        ("static:scheduler=h", "--mesh: 'scheduler=h' is not SERVICE=HOST:PORT"),
        ("static:scheduler=:1", "--mesh: 'scheduler=:1' is not SERVICE=HOST:PORT"),
        ("static:scheduler=h:port", "--mesh: 'scheduler=h:port' is not SERVICE=HOST:PORT"),
        ("static:scheduler=h:0", "--mesh: 'scheduler=h:0' is not SERVICE=HOST:PORT"),
        (
            "static:scheduler=10.0.0.1:7103",
            "--mesh: this scheduler is 127.0.0.1:7103, which is not in the list",
        ),
    ],
)
def test_each_mistake_gets_one_clear_line(mesh: str, line: str) -> None:
    with pytest.raises(BadSetting) as refusal:
        address(mesh)
    assert str(refusal.value) == line


@pytest.mark.parametrize("mesh", ["dns", "static:scheduler=127.0.0.1:7103"])
def test_plain_tcp_needs_a_switch(mesh: str) -> None:
    with pytest.raises(BadSetting, match="--allow-plain-tcp, which lets anybody in"):
        MeshAddress.from_settings(SCHEDULER, Settings(mesh=mesh))


def test_keys_are_read_before_anything_is_bound(tmp_path: Path) -> None:
    def given(**settings: Any) -> Settings:
        return Settings(mesh="dns", mesh_keys=str(tmp_path), **settings)

    with pytest.raises(BadSetting, match="cannot be read"):
        MeshAddress.from_settings(SCHEDULER, given())
    file = make_keys(tmp_path)
    own = MeshAddress.from_settings(SCHEDULER, given())
    assert own.keys == MeshKeys.load(tmp_path)
    assert own.keys is not None
    assert own.keys.secret.decode() not in repr(own)
    with pytest.raises(BadSetting, match="either --mesh-keys"):
        MeshAddress.from_settings(SCHEDULER, given(allow_plain_tcp=True))
    with pytest.raises(FileExistsError):
        make_keys(tmp_path)
    file.chmod(0o644)
    with pytest.raises(BadSetting, match="others can read"):
        MeshAddress.from_settings(SCHEDULER, given())
    (tmp_path / "mesh.key_secret").write_text("nothing")
    file.chmod(0o600)
    with pytest.raises(BadSetting, match="cannot be read"):
        MeshAddress.from_settings(SCHEDULER, given())


def test_leaving_unlinks_the_own_inbox_only(run_directory: Path) -> None:
    own = address(f"ipc:{run_directory}")
    for name in ("scheduler.0.sock", "tokenizer.0.sock"):
        (run_directory / name).touch()
    own.leave()
    own.leave()  # the launcher may have been quicker
    assert [path.name for path in run_directory.iterdir()] == ["tokenizer.0.sock"]


def test_an_abandoned_directory_goes_with_its_sockets_but_not_with_others_files(
    tmp_path: Path, run_directory: Path
) -> None:
    ours, shared = run_directory / "ours", run_directory / "shared"
    for directory in (ours, shared):
        directory.mkdir()
        (directory / "tokenizer.0.sock").touch()
    (shared / "thesis.txt").touch()
    addresses = [address(f"ipc:{directory}") for directory in (ours, shared)]
    for own in (*addresses, *addresses):  # orphans do it all at once
        own.abandon()
    assert [path.name for path in run_directory.iterdir()] == ["shared"]
    assert [path.name for path in shared.iterdir()] == ["thesis.txt"]
