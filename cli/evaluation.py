"""`distill eval`: score a model."""

import json
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import click

from cli.common import common_options, duration, emit, is_set, print_status, progress_bar
from cli.options import PATH, model_options, output_option, tasks_option, text_key

if TYPE_CHECKING:
    from distill.evaluation.base import Report, Task, TaskScore
    from distill.evaluation.roles import TeacherSource


@click.command(name="eval")
@click.argument("model")
@click.option("--data", type=PATH, help="Folder of the files of the nine tasks.")
@tasks_option
@click.option("--retrieval", multiple=True, metavar="DIR", type=PATH, help="A folder in BEIR's layout. Repeatable.")
@click.option(
    "--mode",
    "modes",
    multiple=True,
    metavar="MODE",
    help="Encoder of queries and documents in --retrieval: student, teacher, or asymmetric, where the teacher encodes "
    "the documents. Repeatable.  [default: student]",
)
@click.option("--tasks-file", type=PATH, metavar="FILE", help="Your own tasks, in YAML.")
@click.option("--texts", type=PATH, metavar="CORPUS", help="Texts without labels, for agreement with the teacher.")
@text_key
@click.option("--mteb", multiple=True, metavar="TASK", help="A task of the MTEB library. Repeatable.")
@click.option("--teacher", metavar="MODEL", help="The teacher, for texts that the cache lacks.")
@click.option(
    "--cache",
    type=PATH,
    help="Reuse vectors from this cache and add new ones.  [default: none; a run's cache for its teacher]",
)
@click.option("--space", help="Space of the teacher's vectors, if the cache has several.")
@click.option("--query-prompt", help="Prompt of queries.  [default: that of the model's files]")
@click.option("--document-prompt", help="Prompt of documents.  [default: that of the model's files]")
@click.option("--teacher-query-prompt", help="The teacher's prompt of queries.")
@click.option("--teacher-document-prompt", help="The teacher's prompt of documents.")
@model_options
@click.option("--dtype", default="fp32", help="fp32, bf16, or auto: bf16 on hardware that supports it.")
@output_option("Also write the scores to this file, as JSON.")
@common_options
def evaluate(
    model: str,
    data: Path | None,
    tasks: tuple[str, ...] | None,
    retrieval: tuple[Path, ...],
    modes: tuple[str, ...],
    tasks_file: Path | None,
    texts: Path | None,
    text_key: str,
    mteb: tuple[str, ...],
    cache: Path | None,
    query_prompt: str | None,
    document_prompt: str | None,
    dtype: str,
    output: Path | None,
    **given: Any,
) -> None:
    """Score a model.

    MODEL is a run folder, a sentence-transformers or transformers folder, or a hub id. It is scored on the nine tasks
    (--data), your own tasks (--tasks-file), MTEB tasks (--mteb), retrieval (--retrieval), and on texts without labels
    (--texts); at least one of these is needed.

    \b
    Example:
      distill eval my-run --data task-files --tasks stsb,sick
    """
    from distill.evaluation.evaluator import evaluate_model, nine_tasks
    from distill.evaluation.scores import finite, provenance, resolved_options
    from distill.report.tables import task_table
    from teacher_cache.teachers.base import TeacherOptions

    _check_modes(modes, retrieval)
    teacher = _teacher_source(given, cache, dtype)
    options = resolved_options(TeacherOptions(model=model, dtype=dtype, **given))
    further = _further_tasks(retrieval, modes, tasks_file, texts, text_key)
    with progress_bar() as update:
        update("scoring the model", 0, 0, "")
        report = evaluate_model(
            options,
            data,
            names=tasks,
            tasks=further,
            cache=cache,
            query_prompt=query_prompt,
            document_prompt=document_prompt,
            teacher=teacher,
            mteb=mteb,
            announce=print_status,
            progress=update,
        )
    scored = [*([] if data is None else nine_tasks(data, tasks)), *further]
    record: dict[str, Any] = finite(report.to_json()) | provenance(options, scored)
    if not is_set("json"):
        from rich.console import Console

        Console().print(task_table({model: report}))
    emit(record, lambda: _lines(report))
    if output is not None:
        output.write_text(json.dumps(record, indent=2, allow_nan=False), encoding="utf-8")


def _check_modes(modes: tuple[str, ...], retrieval: tuple[Path, ...]) -> None:
    """Refuse unknown modes, and modes without a retrieval task."""
    from distill.evaluation.base import require_known
    from distill.evaluation.retrieval import MODES

    require_known(modes, MODES, "unknown mode")
    if modes and not retrieval:
        raise click.BadParameter("it is a mode of --retrieval: give a folder with --retrieval", param_hint="--mode")


def _teacher_source(given: dict[str, Any], cache: Path | None, dtype: str) -> "TeacherSource":
    """The teacher from its options, which are removed from `given`; the model's options are left."""
    from distill.evaluation.roles import TeacherSource
    from teacher_cache.teachers.base import TeacherOptions

    model, space = given.pop("teacher"), given.pop("space")
    if cache is not None:
        dtype = "auto"  # the precision of the teacher's space in the cache, if it has one
    shared = {name: given[name] for name in ("device", "attn_implementation", "trust_remote_code")}
    return TeacherSource(
        cache=cache,
        space=space,
        model=None if model is None else TeacherOptions(model=model, dtype=dtype, **shared),
        query_prompt=given.pop("teacher_query_prompt"),
        document_prompt=given.pop("teacher_document_prompt"),
    )


def _further_tasks(
    retrieval: tuple[Path, ...], modes: tuple[str, ...], tasks_file: Path | None, texts: Path | None, text_key: str
) -> list["Task"]:
    """The tasks besides the nine."""
    from distill.evaluation.retrieval import retrieval_tasks

    tasks = [task for folder in retrieval for task in retrieval_tasks(folder, modes or ("student",))]
    if tasks_file is not None:
        from distill.evaluation.task_file import read_task_file

        tasks += read_task_file(tasks_file)
    if texts is not None:
        from distill.evaluation.label_free import label_free_tasks

        tasks += label_free_tasks(texts, text_key=text_key)
    return tasks


def _lines(report: "Report") -> list[str]:
    """The figures that are not in the table."""
    lines = [
        f"{name}: recall at 100 {task.extra['recall_at_100']:.1f}, MRR at 10 {task.extra['mrr_at_10']:.1f}, "
        f"{task.extra['queries']:,.0f} queries, {task.extra['documents']:,.0f} documents"
        for name, task in report.tasks.items()
        if "mrr_at_10" in task.extra
    ]
    lines += [
        f"{name}: overlap of the 10 nearest neighbors {task.extra['overlap']:.1f}, {task.extra['texts']:,.0f} texts"
        for name, task in report.tasks.items()
        if "overlap" in task.extra
    ]
    for name, task in report.tasks.items():
        if "error" in task.extra:
            lines += _approximation_lines(name, task)
    texts = f"{report.texts:,} distinct texts, each encoded once, in " if report.texts else ""
    return [*lines, f"{texts}{duration(report.seconds)}"]


def _approximation_lines(name: str, task: "TaskScore") -> list[str]:
    """The errors of an approximation, and the texts with the largest and smallest errors, each cut to a line."""
    figures = {key: f"{value:.3f}" for key, value in task.extra.items()}
    lines = [
        f"{name}: distance to the teacher's vector, both of length 1: mean {figures['error']}, median "
        f"{figures['error_median']}, 90 % below {figures['error_p90']}, 99 % below {figures['error_p99']}, "
        f"{task.extra['texts']:,.0f} texts"
    ]
    for which, examples in task.examples.items():
        lines.append(f"  {which}:")
        lines += [f"  {example.value:.3f}  {shorten(example.text, 100, placeholder='…')}" for example in examples]
    return lines
