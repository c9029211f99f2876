"""Compile the C++ operations on first use, keep the library in the user's cache, load it.

The library's name carries a hash of the sources, the compiler, its flags and the CPU, so a change of any of them makes
a new one, and an old one is never loaded by mistake. It is compiled under a temporary name and then renamed, so
processes that compile at the same time do not disturb one another. Where it cannot be compiled, `problem()` says why,
once in the log, and the portable operations run instead.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

log = logging.getLogger("rmt.ops")

HERE = Path(__file__).parent
SOURCES = ("boundary.cpp", "attention.cpp", "loss.cpp", "activation.cpp", "decode.cpp")
HEADERS = ("tile.h", "exponential.h")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno", "-Wall")
COMPILERS = ("g++", "clang++", "c++")
TIMEOUT_S = 300
FLOPS_PER_THREAD = 4e6


def problem() -> str:
    """Why the native operations cannot run here, in one sentence; empty if they can."""
    return _load()[1]


def library() -> ctypes.CDLL:
    """The compiled operations. Ask `problem()` first."""
    found, why = _load()
    if found is None:
        raise RuntimeError(why)
    return found


def threads(flops: float) -> int:
    """As many as PyTorch uses, but one for work that is done sooner than a second thread wakes up."""
    return max(1, min(torch.get_num_threads(), int(flops / FLOPS_PER_THREAD)))


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    try:
        return ctypes.CDLL(str(_compiled())), ""
    except (OSError, subprocess.SubprocessError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        log.warning("native operations are not available, the portable ones run instead: %s.", why)
        return None, f"{why}."


def _compiled() -> Path:
    """The library's file, compiled now if the cache does not hold it."""
    compiler = _compiler()
    name = f"rmt-{_fingerprint(compiler)}.so"
    folder = cache_folder()
    try:
        if (folder / name).exists():
            return folder / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _compile(compiler, folder / name)
    except OSError as error:
        if error.filename is None or not str(error.filename).startswith(str(folder)):
            raise
        temporary = Path(tempfile.mkdtemp(prefix="rmt-"))
        log.warning("cannot write to %s (%s): the native operations are compiled for this run only.", folder, error)
        try:
            return _compile(compiler, temporary / name)
        finally:
            _remove_at_exit(temporary)


def _compile(compiler: list[str], target: Path) -> Path:
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.stem, suffix=".tmp", delete=False) as file:
        temporary = Path(file.name)
    try:
        sources = [str(HERE / name) for name in SOURCES]
        done = subprocess.run(
            [*compiler, *FLAGS, "-o", str(temporary), *sources], capture_output=True, text=True, timeout=TIMEOUT_S
        )
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            raise OSError(f"{compiler[0]} failed: {first}")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def cache_folder() -> Path:
    """RMT_CACHE, or `rmt` in the user's cache folder."""
    if chosen := os.environ.get("RMT_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rmt"


def _compiler() -> list[str]:
    """CXX if it is set, else the first known compiler."""
    if chosen := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(chosen[0]) is None:
            raise OSError(f"the compiler CXX={chosen[0]} is not there")
        return chosen
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise OSError("no C++ compiler (install g++ or clang++, or set CXX)")


def _fingerprint(compiler: list[str]) -> str:
    digest = hashlib.sha256()
    for name in (*HEADERS, *SOURCES):
        digest.update((HERE / name).read_bytes())
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=30).stdout
    digest.update("\0".join((*compiler, version, *FLAGS, platform.machine(), _cpu())).encode())
    return digest.hexdigest()[:20]


def _cpu() -> str:
    """What tells one CPU's instruction set from another's."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _remove_at_exit(folder: Path) -> None:
    import atexit

    atexit.register(shutil.rmtree, folder, ignore_errors=True)
