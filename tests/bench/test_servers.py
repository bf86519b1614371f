"""Servers never outlive the benchmark; stand-in processes, no SGLang."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench.servers import ServerError, sglang_server, stopped_at_exit


@pytest.fixture
def sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every server is a process that only sleeps."""
    start = subprocess.Popen

    def instead(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        assert "--sleep-on-idle" in command
        process: subprocess.Popen[bytes] = start(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            **options,  # type: ignore[call-overload]
        )
        return process

    monkeypatch.setattr(subprocess, "Popen", instead)


@pytest.mark.usefixtures("sleeping")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_all_stop_when_the_benchmark_is_asked_to_end(sent: signal.Signals, tmp_path: Path) -> None:
    def otherwise(signum: int, frame: object) -> None:
        raise InterruptedError("nobody stops the servers")

    before = signal.signal(sent, otherwise)
    try:
        _all_stop(sent, tmp_path)
        assert signal.getsignal(sent) is otherwise
    finally:
        signal.signal(sent, before)


def _all_stop(sent: signal.Signals, tmp_path: Path) -> None:
    pids = []
    with pytest.raises(SystemExit) as ended, stopped_at_exit() as servers:
        for name in ("one", "two"):
            servers.append(sglang_server(name, "model", [], tmp_path / name))
            pids.append(servers[-1].pid)
        assert all(psutil.pid_exists(pid) for pid in pids)
        os.kill(os.getpid(), sent)
        signal.pause()
    assert ended.value.code == 128 + sent
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """As under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopped_at_exit():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_server_that_ends_while_it_starts_shows_its_log(tmp_path: Path) -> None:
    with stopped_at_exit() as servers:
        servers.append(
            sglang_server("mine", "no-such-model", ["--no-such-option"], tmp_path / "log")
        )
        with pytest.raises(ServerError, match=r"(?s)mine ended with exit code .*no-such-option"):
            servers[0].wait_until_ready()
