"""The pages hold together: links lead somewhere, and every `rmt` command line in them parses as far as its name."""

import re
from pathlib import Path

import pytest

import rmt
from rmt.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    missing = [link for link in local if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_and_preset_that_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```(?:sh|bash|console)?\n(.*?)```", text, re.DOTALL))
    for name in re.findall(r"^(?:\$ )?rmt ([a-z-]+)", blocks, re.MULTILINE):
        assert name in COMMANDS, name
    for name in re.findall(r"--preset ([a-z0-9-]+)", text):
        assert name in rmt.presets(), name
