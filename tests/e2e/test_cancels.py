"""Clients that leave in every way leave nothing behind, in any of the real processes."""

from __future__ import annotations

import json

import pytest

from benchmarks import cancels

pytestmark = pytest.mark.e2e


def run(capsys: pytest.CaptureFixture[str], num_clients: int) -> None:
    code = cancels.main(["--clients", str(num_clients)])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["grew"] == {}
    assert report["failures"] == {}
    assert code == 0
    assert report["clients"] == num_clients
    assert report["chunks_read"] > num_clients


def test_hundreds_of_clients_leave_and_nothing_grows(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, 400)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_clients_leave_and_nothing_grows(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, 10_000)
