"""The paper's experiments are declared right, and their prices are those of the accounting."""

import json

import pytest

from rmt.cli import main


def test_the_papers_variants_are_listed_with_their_published_sizes(capsys):
    assert main(["sweep", "variants", "--scale", "paper", "--dry-run", "--json"]) == 0
    rows = {row["stream"]: row for row in json.loads(capsys.readouterr().out)}
    assert {stream: row["parameters"] for stream, row in rows.items()} == {
        "matrix": 134_291_072,
        "vector": 162_541_824,
        "highway": 190_871_808,
        "aggregation": 164_903_424,
        "depthwise_lstm": 233_376_000,
    }
    assert {row["tokens"] for row in rows.values()} == {50_000 * 64 * 512}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("variant", "Did you mean 'variants'"),
        ("variants --scale papers", "Did you mean 'paper'"),
        ("variants --out O", "give --data"),
        ("variants --data D", "give --out"),
    ],
)
def test_bad_input_is_one_clear_line(flags, message, capsys):
    assert main(["sweep", *flags.split()]) == 2
    assert message in capsys.readouterr().err
