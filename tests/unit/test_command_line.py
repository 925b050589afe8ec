"""The command line: every flag is explained, and a wrong one costs one line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

import pytest

from canopy import cli


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate"], "--prompt --chat"),
        (["generate", "--prompt", "x", "--maxtokens", "3"], "--maxtokens"),
        (["serve", "all", "--port", "x"], "--port"),
        (["serv"], "'serv'"),
        (["head", "init", "d"], "--target"),
        (["plan", "--dtype", "int4"], "--dtype"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith("canopy")
    assert named in line
    assert re.search("; see `canopy.* --help`$", line)


def test_every_flag_has_a_help_text() -> None:
    unexplained = [
        f"{parser.prog} {action.option_strings or action.dest}"
        for parser in parsers(cli._parser())
        for action in parser._actions
        if not action.help and not isinstance(action, argparse._SubParsersAction)
    ]
    assert unexplained == []


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)
