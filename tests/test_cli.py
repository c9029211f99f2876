"""The command itself: quick help, and failures that are one line with the right exit status."""

import subprocess
import sys

import pytest

from rmt.cli import COMMANDS, main


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "rmt.cli", *arguments], capture_output=True, text=True, timeout=120)


def test_help_imports_no_torch():
    code = "import sys; from rmt.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert "commands:" in answer.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code in (0, None)
    assert f"rmt {name}" in capsys.readouterr().out


def test_an_unknown_command_is_met_with_the_nearest_in_one_line():
    answer = run("cuont")
    assert answer.returncode == 2
    assert answer.stderr == "rmt: there is no command 'cuont'. Did you mean 'count'?\n"


def test_version_is_printed():
    assert run("--version").stdout.startswith("rmt 0.")
