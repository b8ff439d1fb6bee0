"""Update ranks on several hosts: a coordinator behind a key, and what strangers and cables do to it."""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from shaped_link import ShapedLink, why_not
from tests.support.network_spaces import move_to
from tests.support.patience import PATIENT_S, SOON_S
from tests.support.ranks import check, run_ranks
from tests.support.update.crashes import Crash, arm
from tests.support.update.models import SMALL, Compare, model, served, source_of, trained
from tests.support.update.passing import expire
from tests.support.update.workers import Trouble, Workers
from treadle.host.sockets import connect
from treadle.update import UpdateError, UpdateOptions, Updater
from treadle.update.coordinator.commit_log import CommitLog
from treadle.update.coordinator.coordinator_thread import Coordinator
from treadle.update.protocol.control import FromCoordinator, Proceed, ToCoordinator
from treadle.update.protocol.update_messages import PROTOCOL, Hello
from treadle.update.rank.rendezvous import Rendezvous
from treadle.weights.tensor_boxes import Holding
from treadle.wire.errors import RefusedError, WireError
from treadle.wire.frames import framed
from treadle.wire.link import Link
from treadle.wire.listeners import MOST_STRANGERS, listen_at_path
from treadle.wire.seal import NONCE_BYTES, Seal, read_key

pytestmark = pytest.mark.slow

OPTIONS = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=1)


# ---- the seal --------------------------------------------------------------------------------------------------------


def met(key: bytes = b"k" * 32, other: bytes = b"k" * 32) -> tuple[Seal, Seal]:
    listens, calls = Seal(key, listens=True), Seal(other, listens=False)
    listens.meet(calls.nonce)
    calls.meet(listens.nonce)
    return listens, calls


def test_what_is_sealed_with_the_key_is_opened() -> None:
    listens, calls = met()
    for body in (b"", b"one", secrets.token_bytes(5000)):
        assert listens.open(calls.close(body)) == body
        assert calls.open(listens.close(body)) == body


def refuse(seal: Seal, sealed: bytes) -> None:
    with pytest.raises(WireError, match="not made with this key"):
        seal.open(sealed)


def test_what_is_not_made_with_the_key_for_this_place_is_refused() -> None:
    listens, calls = met()
    one, two = calls.close(b"one"), calls.close(b"two")
    refuse(listens, two)  # the first was left out
    listens, calls = met()
    one = calls.close(b"one")
    listens.open(one)
    refuse(listens, one)  # again
    refuse(met()[0], one)  # in another session
    listens, calls = met()
    refuse(calls, calls.close(b"one"))  # sent back to who sent it
    for at in (0, 3, -1):
        listens, calls = met()
        changed = bytearray(calls.close(b"body"))
        changed[at] ^= 1
        refuse(listens, bytes(changed))
    listens, calls = met(other=b"l" * 32)
    refuse(listens, calls.close(b"one"))
    refuse(met()[0], b"short")


def test_a_key_is_a_file_of_its_owner_and_long(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(secrets.token_bytes(40).hex().encode() + b"\n")
    path.chmod(0o640)
    with pytest.raises(PermissionError, match=r"its mode is 0640; chmod 600 "):
        read_key(path)
    path.chmod(0o600)
    assert len(read_key(path)) == 80
    path.write_text("secret")
    with pytest.raises(ValueError, match="has 6 bytes, at least 32 are needed; make one with"):
        read_key(path)


# ---- ranks that do not share a directory -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Hosts:
    """Where each rank's host has its sockets, its ledger and its key."""

    sockets: tuple[Path, ...]
    ledger: Path
    keys: tuple[Path | None, ...]

    def updater(self, rank: int, address: str | None = None) -> Updater:
        return Updater(self.sockets[rank], ledger=self.ledger, key=self.keys[rank], address=address, options=OPTIONS)


def two_hosts(workers: Workers) -> Hosts:
    """Two workers on each of two hosts; each host has a directory of its own."""
    directories = []
    key = workers.directory / "key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    for worker in range(4):
        directory = workers.directory / f"host{worker // 2}"
        directory.mkdir(mode=0o700, exist_ok=True)
        os.link(workers.sockets / f"worker-{worker}.sock", directory / f"worker-{worker}.sock")
        directories.append(directory)
    return Hosts(tuple(directories), workers.ledger, (key,) * 4)


def layouts() -> tuple[Holding, Holding]:
    tensors = model(2, 64)
    return trained(tensors, 2), served(tensors)


def twice(rank: int, hosts: Hosts, have: Holding) -> list[int]:
    with hosts.updater(rank) as updater:
        return [updater.update(source_of(have, rank, version), version).version for version in (1, 2)]


def test_ranks_of_two_hosts_update_with_a_key() -> None:
    have, want = layouts()
    with Workers(want) as workers:
        hosts = two_hosts(workers)
        assert check(run_ranks(4, twice, hosts, have)) == [[1, 2]] * 4
        assert all(workers.tell(worker, Compare(2)) == [] for worker in range(4))
        assert not list(workers.directory.glob("**/coordinator.sock"))


def fails(rank: int, hosts: Hosts, have: Holding, crash: Crash | None, mark: Path) -> tuple[str, float]:
    with hosts.updater(rank) as updater:
        arm(updater, crash, None, mark)
        try:
            updater.update(source_of(have, rank, 1), 1)
        except UpdateError as error:
            return str(error), time.monotonic()
    return "", 0.0


@pytest.mark.parametrize("lost", [0, 3])
def test_a_killed_rank_is_named_with_its_host(lost: int, tmp_path: Path) -> None:
    have, want = layouts()
    mark = tmp_path / "mark"
    with Workers(want) as workers:
        hosts = two_hosts(workers)
        outcomes = run_ranks(4, fails, hosts, have, Crash(lost, "bucket", bucket=3), mark)
        died = outcomes[lost].ended_s
        for told, at in check([outcome for outcome in outcomes if outcome.rank != lost]):
            assert f"update rank {lost}" in told
            assert f" on {socket.gethostname()})" in told
            assert at - died < SOON_S
        assert check(run_ranks(4, twice, hosts, have)) == [[1, 2]] * 4


def error_of(rank: int, hosts: Hosts, have: Holding | None = None) -> str:
    """What starting an updater raises, or its first update where there is something to send."""
    told, updater = "", None
    try:
        updater = hosts.updater(rank)
        if have is not None:
            updater.update(source_of(have, rank, 1), 1)
    except (ValueError, RuntimeError, OSError) as error:
        told = f"{type(error).__name__}: {error}"
    dist.barrier()  # the coordinator is there until all have been
    if updater is not None:
        updater.close()
    return told


def test_some_with_a_key_and_some_without_are_told() -> None:
    _, want = layouts()
    with Workers(want) as workers:
        hosts = two_hosts(workers)
        (key,) = set(hosts.keys)
        told = check(run_ranks(4, error_of, Hosts(hosts.sockets, hosts.ledger, (key, key, None, key))))
        assert "update rank 0 was given a key and this rank none" in told[2]
        one_host = (*hosts.sockets[:2], hosts.sockets[0], hosts.sockets[3])  # without a key there is one directory
        told = check(run_ranks(4, error_of, Hosts(one_host, hosts.ledger, (None, None, None, key))))
        assert "this rank was given a key and update rank 0 none" in told[3]
        (hosts.ledger / "ledger.json").write_text("{")
        told = check(run_ranks(4, error_of, hosts))
        assert "is not a ledger" in told[0]
        assert all("update rank 0 could not start its coordinator: " in text for text in told[1:]), told


def test_a_rank_that_cannot_start_is_named_by_those_that_wait_for_it() -> None:
    """One rank has no key, or none that it can read: it never joins."""
    have, want = layouts()
    with Workers(want) as workers:
        hosts = two_hosts(workers)
        (key,) = set(hosts.keys)
        for wrong, why in ((None, "update rank 0 was given a key and this rank none"), (Path("none"), "No such file")):
            told = check(run_ranks(4, error_of, Hosts(hosts.sockets, hosts.ledger, (key, key, wrong, key)), have))
            assert why in told[2]
            for rank in (0, 1, 3):
                assert told[rank].startswith(
                    "UpdateError: update rank 2, in phase enter of attempt 0: it could not start"
                )
                assert why in told[rank]
        told = check(run_ranks(4, error_of, Hosts(hosts.sockets, hosts.ledger, (Path("none"), key, key, key)), have))
        assert all("No such file" in text for text in told), told
        assert check(run_ranks(4, twice, hosts, have)) == [[1, 2]] * 4


def one_wrong_key(rank: int, hosts: Hosts, have: Holding) -> str:
    try:
        with hosts.updater(rank) as updater:
            links = updater.coordinator.links if updater.coordinator is not None else None
            expire(updater, 3, lambda: links is not None and bool(links.turned_away))
            updater.update(source_of(have, rank, 1), 1)
    except UpdateError as error:
        return str(error)
    return ""


def test_a_rank_with_another_key_is_not_let_in() -> None:
    have, want = layouts()
    with Workers(want) as workers:
        hosts = two_hosts(workers)
        other = workers.directory / "other"
        other.write_text(secrets.token_hex(32))
        other.chmod(0o600)
        mixed = Hosts(hosts.sockets, hosts.ledger, (*hosts.keys[:3], other))
        told = check(run_ranks(4, one_wrong_key, mixed, have))
        assert "not made with this key, so it has another one; give all ranks the same key file" in told[3]
        assert all("update rank 3" in text and "not heard of" in text for text in told[:3]), told
        assert all(
            "a process on 127.0.0.1 was turned away: its messages are not made with" in text for text in told[:3]
        )
        secret = {key.read_text() for key in (other, *hosts.keys) if key is not None}
        assert not any(key in text for key in secret for text in told)
        assert all(workers.tell(worker, Compare(1)) != [] for worker in range(4))


# ---- strangers -------------------------------------------------------------------------------------------------------


def pester(port: int, stop: threading.Event, tried: list[int]) -> None:
    """Opens connections that send nothing, too much, or garbage."""
    silent = []
    while not stop.is_set():
        with suppress(OSError):
            one = socket.create_connection(("127.0.0.1", port), timeout=2)
            say: list[Callable[[], Any]] = [
                lambda: None,
                lambda: one.sendall(framed(secrets.token_bytes(NONCE_BYTES)) + framed(secrets.token_bytes(200))),  # noqa: B023
                lambda: one.sendall(b"\xff" * 64),  # noqa: B023
                lambda: one.sendall(framed(secrets.token_bytes(NONCE_BYTES)) + framed(b"")),  # noqa: B023
            ]
            say[tried[0] % len(say)]()
            silent.append(one)
        tried[0] += 1
        if len(silent) > 32:
            silent.pop(0).close()
        time.sleep(0.002)
    for one in silent:
        one.close()


def beside_strangers(rank: int, hosts: Hosts, have: Holding) -> tuple[list[int], int]:
    stop, tried = threading.Event(), [0]
    with hosts.updater(rank) as updater:
        if updater.coordinator is not None:
            port = updater.coordinator.listener.server.getsockname()[1]
            threading.Thread(target=pester, args=(port, stop, tried), daemon=True).start()
            time.sleep(1)
        versions = [updater.update(source_of(have, rank, version), version).version for version in range(1, 4)]
        stop.set()
    return versions, tried[0]


def crowd(port: int, stop: threading.Event) -> None:
    """Keeps more silent connections open than the coordinator holds, and opens new ones all the time."""
    silent: deque[socket.socket] = deque()
    while not stop.is_set():
        with suppress(OSError):
            silent.append(socket.create_connection(("127.0.0.1", port), timeout=2))
        if len(silent) > 4 * MOST_STRANGERS:
            silent.popleft().close()
        time.sleep(0.002)
    for one in silent:
        one.close()


def pushed_out(rank: int, hosts: Hosts, have: Holding) -> tuple[int, int]:
    """An update of ranks whose first connections are closed in a crowd before they say who they are."""
    stop, calls = threading.Event(), []
    call = Rendezvous.call

    def slowly(rendezvous: Rendezvous, deadline_s: float) -> Any:
        link, name = call(rendezvous, deadline_s)
        calls.append(link)
        if len(calls) <= 2 and rank != 0:
            poll = select.poll()
            poll.register(link.connection, select.POLLRDHUP)
            assert poll.poll(PATIENT_S * 1000)
        return link, name

    with patch.object(Rendezvous, "call", slowly), hosts.updater(rank) as updater:
        if updater.coordinator is not None:
            port = updater.coordinator.listener.server.getsockname()[1]
            threading.Thread(target=crowd, args=(port, stop), daemon=True).start()
        version = updater.update(source_of(have, rank, 1), 1).version
        stop.set()
    return version, len(calls)


def test_a_rank_that_is_pushed_out_by_strangers_calls_again() -> None:
    have, want = layouts()
    with Workers(want) as workers:
        done = check(run_ranks(4, pushed_out, two_hosts(workers), have))
        assert all(version == 1 for version, _ in done)
        assert all(calls >= 3 for _, calls in done[1:]), done
        assert all(workers.tell(worker, Compare(1)) == [] for worker in range(4))


def test_a_rank_for_which_there_is_no_place_is_told_so(place: Path) -> None:
    listener = listen_at_path(place / "c.sock", ToCoordinator)
    coordinator = Coordinator(listener, CommitLog(place / "ledger"), 2, UpdateOptions(deadline_s=PATIENT_S, drain_s=0))
    callers = []
    try:
        for rank, world, role in ((1, 2, "join"), (1, 2, "join"), (-1, 2, "join"), (0, 3, "join"), (0, 2, "update")):
            calls: Link[Any] = Link(connect(place / "c.sock"), FromCoordinator)
            calls.send(Hello(PROTOCOL, role, rank, world, os.getpid(), "here"))  # type: ignore[arg-type]
            callers.append(calls)
            if len(callers) == 1:
                assert calls.receive(PATIENT_S) == Proceed(0, "enter")
            else:
                why = f"no place for update rank {rank} of 2" if (world, role) == (2, "join") else "world 2, got Hello"
                with pytest.raises(RefusedError, match=why):
                    calls.receive(PATIENT_S)
    finally:
        coordinator.close()
        for calls in callers:
            calls.close()


def test_strangers_at_the_port_change_nothing() -> None:
    have, want = layouts()
    with Workers(want) as workers:
        done = check(run_ranks(4, beside_strangers, two_hosts(workers), have))
        assert all(versions == [1, 2, 3] for versions, _ in done)
        assert done[0][1] > 100
        assert all(workers.tell(worker, Compare(3)) == [] for worker in range(4))


# ---- a network between them ------------------------------------------------------------------------------------------


def over_a_link(
    rank: int, link: ShapedLink, port: int, hosts: Hosts, have: Holding, versions: list[int], mark: Path
) -> tuple[list[int], str, float]:
    """Updates from a rank that has moved to its host, for good; the last one may fail."""
    dist.destroy_process_group()
    move_to(link, rank // 2)
    store = TCPStore(link.address(0), port, 4, is_master=rank == 0, timeout=timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=30))
    made = []
    with hosts.updater(rank) as updater:
        try:
            for version in versions:
                if version == versions[-1]:
                    mark.touch()
                made.append(updater.update(source_of(have, rank, version), version).version)
        except UpdateError as error:
            return made, str(error), time.monotonic()
    return made, "", 0.0


def test_over_a_real_link_and_when_its_cable_is_pulled(tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"there can be no link between hosts here: {reason}")
    have, want = layouts()
    with Workers(want) as workers, ShapedLink("1gbit") as link:
        hosts = two_hosts(workers)
        done = check(run_ranks(4, over_a_link, link, 29500, hosts, have, [1, 2], tmp_path / "none", new=True))
        assert [made for made, _, _ in done] == [[1, 2]] * 4
        assert all(workers.tell(worker, Compare(2)) == [] for worker in range(4))

        workers.tell(0, Trouble("hang", "load", 2, hang_s=3.0))  # long enough to pull the cable
        mark = tmp_path / "mark"
        pulled: list[float] = []

        over = threading.Event()

        def pull() -> None:
            while not mark.exists():
                if over.wait(0.01):
                    return
            over.wait(1.0)
            link.cut(1)
            pulled.append(time.monotonic())

        thread = threading.Thread(target=pull)
        thread.start()
        outcomes = run_ranks(4, over_a_link, link, 29501, hosts, have, [3], mark, new=True)
        over.set()
        thread.join()
        for outcome in outcomes:
            assert outcome.value is not None, str(outcome)
            made, told, at = outcome.value
            assert not made
            lost = ("update rank 2", "update rank 3") if outcome.rank < 2 else ("the coordinator (update rank 0",)
            assert any(name in told for name in lost), told
            assert "is out of reach" in told
            assert at - pulled[0] < SOON_S, told
