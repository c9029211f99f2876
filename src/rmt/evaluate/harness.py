"""Downstream tasks by lm-evaluation-harness: the official task definitions, online or from local jsonl files.

With a local folder a task keeps its definition (prompt, choices, metrics); only the place of its data changes. The
files are named TASK_SPLIT.jsonl, one record per line with the fields that the task reads (docs/evaluation.md).
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from rmt.errors import InputError, suggest
from rmt.hub.export import adapter
from rmt.hub.folder import Loaded

PAPER_TASKS = ("lambada_openai", "wikitext", "arc_challenge", "arc_easy", "hellaswag", "piqa", "winogrande")
MISSING = "this needs lm-evaluation-harness: pip install 'residual-matrix-transformer[eval]'."
FILE_NAMES = {"winogrande": "winogrande_xl_{split}.jsonl", "wikitext": "wikitext2_raw_{split}_documents.jsonl"}
SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
BOOTSTRAPS = 100  # for the standard errors of perplexities


def run_tasks(
    loaded: Loaded, tasks: list[str], *, local: Path | None = None, limit: int | None = None, batch: int = 16
) -> dict[str, dict[str, Any]]:
    """Each task's metrics, by name, with `samples`, the number of documents.

    Args:
        loaded: the model with its tokenizer.
        tasks: names of harness tasks, tags or groups.
        local: folder with the tasks' data; None: from the hub or its cache.
        limit: use only so many documents of each task.
        batch: sequences per forward pass.
    """
    with quietly():
        chosen = find_tasks(tasks, local)
        import lm_eval

        lm = harness_model(loaded, batch)
        try:
            found = lm_eval.simple_evaluate(
                model=lm,
                tasks=chosen,
                limit=limit,
                bootstrap_iters=BOOTSTRAPS,
                log_samples=False,
                task_manager=task_manager(),
            )
        except (OSError, ConnectionError) as error:
            if isinstance(error, InputError):
                raise
            raise unreachable(error) from error
    assert found is not None
    return {task: metrics(found, task) for task in found["results"] if task in found["n-samples"]}


def harness_model(loaded: Loaded, batch: int = 16) -> Any:
    """The model as the harness's `LM`."""
    from lm_eval.models.huggingface import HFLM

    class CheckedLM(HFLM):
        """The harness only asserts that an answer fits into the context; here it is said in words."""

        def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
            longest = max((len(answer) for _, _, answer in requests), default=0)
            if longest > self.max_length:
                raise InputError(
                    f"an answer has {longest} tokens, {loaded.path} reads {self.max_length} at once: leave the task "
                    "out, or use a model with a longer context."
                )
            return super()._loglikelihood_tokens(requests, *args, **kwargs)

    return CheckedLM(
        pretrained=adapter(loaded),
        tokenizer=transformers_tokenizer(loaded),
        backend="causal",
        batch_size=batch,
        max_length=loaded.model.config.context,
    )


def metrics(found: Any, task: str) -> dict[str, Any]:
    """{"acc": .., "acc_stderr": .., "samples": ..}: the harness's names without its filter's."""
    values = {
        key.partition(",")[0]: value
        for key, value in found["results"][task].items()
        if isinstance(value, int | float) and "," in key
    }
    return {**values, "samples": found["n-samples"][task]["effective"]}


def find_tasks(names: list[str], local: Path | None) -> list[Any]:
    """What `simple_evaluate` takes: names, or whole definitions whose data is local."""
    manager = task_manager()
    for name in names:
        if name not in manager.task_index:
            raise InputError(f"there is no task {name!r}. {nearest(name, manager.all_tasks)}")
    if local is None:
        return list(names)
    if not local.is_dir():
        raise InputError(f"there is no folder {local} with the tasks' data.")
    return [local_task(name, local) for name in names]


def nearest(name: str, known: list[str]) -> str:
    answer = suggest(name, known)
    return answer if answer.startswith("Did") else "`lm-eval ls tasks` lists them."


@cache
def task_manager() -> Any:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise InputError(MISSING) from None
    return TaskManager()


def local_task(name: str, folder: Path) -> dict[str, Any]:
    """A task's official definition with its data in `folder`."""
    from lm_eval.tasks._yaml_loader import load_yaml

    entry = task_manager().task_index[name]
    if entry.yaml_path is None or name in task_manager().all_groups:
        raise InputError(f"{name} is a group of tasks: with --local give its tasks one by one.")
    definition = dict(load_yaml(entry.yaml_path))
    scored = definition.get("test_split") or definition.get("validation_split")
    files: dict[str, str] = {}
    for key in SPLITS:
        split = definition.get(key)
        file = folder / FILE_NAMES.get(name, f"{name}_{{split}}.jsonl").format(split=split)
        if split is None or file.is_file():
            files |= {split: str(file.resolve())} if split else {}
        elif split == scored:
            raise InputError(f"{folder} has no {file.name}, the data of task {name}.")
        else:
            definition[key] = None
    for key in ("tag", "group", "include"):
        definition.pop(key, None)
    data = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    return definition | {"task": name} | data


def transformers_tokenizer(loaded: Loaded) -> Any:
    from transformers import PreTrainedTokenizerFast

    names = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), loaded.need_tokenizer().eot_token)
    return PreTrainedTokenizerFast(tokenizer_object=loaded.tokenizer, clean_up_tokenization_spaces=False, **names)


def unreachable(error: Exception) -> InputError:
    detail = " ".join(str(error).split())[:200]
    return InputError(f"a task's data cannot be fetched ({detail}): give --local DIR, or try again with a network.")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Only errors from the libraries, nothing of theirs on stdout, and no processes started for standard errors."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    names = ("lm_eval", "lm-eval", "datasets", "transformers", "huggingface_hub", "httpx")
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
