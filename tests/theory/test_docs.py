"""The numbers in docs/concepts.md and docs/errata.md are those that the commands beside them print."""

import re
from pathlib import Path

import pytest

import rmt

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROWS = re.findall(r"^\| ([KD]) = (\d+) \|(.+)\|$", (DOCS / "concepts.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("row", ROWS)
def test_the_tables_of_concepts_are_what_count_says(row):
    letter, size, cells = row
    config = (
        rmt.preset("rmt-134m").replace(key_dim=int(size))
        if letter == "K"
        else rmt.preset("transformer-160m").replace(width=int(size))
    )
    counted = rmt.count(config, batch=4)
    activations = counted.memory.training.parts["activations"] / 2**20
    expected = [f"{config.stream_size:,}", f"{counted.params:,}", f"{counted.flops.per_token:,}", f"{activations:,.1f}"]
    assert [cell.strip() for cell in cells.split("|")] == expected


def test_concepts_compares_the_weights_of_reads_and_writes():
    text = (DOCS / "concepts.md").read_text(encoding="utf-8")
    assert len(ROWS) == 6
    for name in ("rmt-134m", "transformer-160m"):
        parts = rmt.count(rmt.preset(name)).params.parts
        assert f"{parts['stream_writes'] + parts['stream_reads']:,}" in text


def test_a_mirrored_pair_is_one_configuration_with_another_stream():
    mirrored = rmt.count(rmt.preset("rmt-134m").replace(stream="vector"))
    assert mirrored.params == rmt.count(rmt.preset("transformer-160m")).params


def test_every_erratum_of_the_page_is_a_test():
    numbers = set(re.findall(r"^## (\d+)\.", (DOCS / "errata.md").read_text(encoding="utf-8"), re.MULTILINE))
    tests = set(re.findall(r"def test_(\d+)_", Path(__file__).with_name("test_errata.py").read_text(encoding="utf-8")))
    assert numbers == tests == {str(number) for number in range(1, 13)}


def test_pictures_of_the_pages_exist():
    for page in ("concepts.md", "errata.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", (DOCS / page).read_text(encoding="utf-8")):
            assert (DOCS / target).exists(), target
