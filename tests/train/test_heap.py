"""Freed memory stays with the process while it trains, and no longer."""

import os
import subprocess
import sys

import pytest

from rmt.train import heap

PROGRAM = """
import resource, torch
from pathlib import Path
from rmt.train import heap

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(25_000_000)  # 100 MB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

cpu = torch.device("cpu")
faults()
usual, before = faults(), resident()
with heap.kept(cpu):
    faults()
    kept, inside = faults(), resident()
print(usual, kept, faults(), inside - before, resident() - before)
"""
PAGES = 100_000_000 // os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


def run(**variables):
    own = {name: value for name, value in os.environ.items() if name not in heap.CHOSEN_BY_USER}
    answer = subprocess.run([sys.executable, "-c", PROGRAM], env=own | variables, capture_output=True, text=True)
    assert not answer.returncode, answer.stderr
    return [int(word) for word in answer.stdout.split()]


@pytest.mark.skipif(heap._libc() is None, reason="malloc is not glibc's, or set by the user")
def test_memory_is_kept_while_training_and_given_back_after_it():
    usual, kept, afterwards, held, left = run()
    assert usual > 0.9 * PAGES
    assert kept < 0.1 * PAGES
    assert afterwards > 0.9 * PAGES
    assert held > 0.9 * PAGES
    assert left < 0.1 * PAGES


@pytest.mark.skipif(heap._libc() is None, reason="malloc is not glibc's, or set by the user")
def test_what_the_user_has_set_stays():
    usual, kept, *_ = run(MALLOC_MMAP_THRESHOLD_="1000000")
    assert usual > 0.9 * PAGES
    assert kept > 0.9 * PAGES
