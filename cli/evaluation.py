"""`distill eval`: score a model."""

import json
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import click

from cli.common import asking_options, check_output, common_options, emit, meta, progress_bar, say

if TYPE_CHECKING:
    from distill.evaluation.base import Report, Task, TaskScore
    from distill.evaluation.roles import TeacherSource

FOLDER = click.Path(path_type=Path)


@click.command(name="eval")
@click.argument("model")
@click.option("--data", type=FOLDER, help="Folder of the nine tasks' files.")
@click.option("--tasks", help="Comma list; all nine by default.")
@click.option(
    "--retrieval", multiple=True, metavar="DIR", type=FOLDER, help="A collection in BEIR's layout. Repeatable."
)
@click.option(
    "--mode",
    "modes",
    multiple=True,
    show_default="student",
    help="Who encodes queries and documents: student, teacher, or asymmetric, where documents are the teacher's. "
    "Repeatable.",
)
@click.option("--tasks-file", type=FOLDER, metavar="FILE", help="Your own tasks, in YAML.")
@click.option(
    "--texts", type=FOLDER, metavar="CORPUS", help="Texts without labels: how near the model is to its teacher on them."
)
@click.option("--text-key", default="text", show_default=True, help="Key or column of the texts.")
@click.option("--mteb", multiple=True, metavar="TASK", help="A task of the MTEB library. Repeatable.")
@click.option("--teacher", metavar="MODEL", help="The teacher, asked for what the cache lacks.")
@click.option("--cache", type=FOLDER, help="Read vectors from here, and keep new ones. A run's teacher has its cache.")
@click.option("--space", help="How the teacher was asked, if the cache has several spaces.")
@click.option("--query-prompt", help="In front of a query; by default as the model's files say.")
@click.option("--document-prompt", help="In front of a document.")
@click.option("--teacher-query-prompt", help="The same for the teacher.")
@click.option("--teacher-document-prompt", help="The same for the teacher.")
@asking_options
@click.option("--dtype", default="fp32", show_default=True, help="fp32, bf16, or auto: bf16 where the machine has it.")
@click.option("-o", "--output", type=FOLDER, help="Also write the JSON here.")
@common_options
def evaluate(
    model: str,
    data: Path | None,
    tasks: str | None,
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
    """Score a model: a run folder, a sentence-transformers or transformers folder, a hub id.

    On the nine tasks (--data), your own (--tasks-file), MTEB's (--mteb), retrieval (--retrieval) by itself, against
    its teacher, or with its teacher's documents, and beside its teacher on texts without labels (--texts).
    """
    from distill.evaluation.evaluator import evaluate_model, nine_tasks
    from distill.evaluation.scores import finite, provenance, resolved_options
    from distill.report.tables import task_table
    from teacher_cache.teachers.base import TeacherOptions

    check_output(output)
    _check_modes(modes, retrieval)
    teacher = _teacher_source(given, cache, dtype)
    options = resolved_options(TeacherOptions(model=model, dtype=dtype, **given))
    names = tasks.split(",") if tasks else None
    further = _further_tasks(retrieval, modes, tasks_file, texts, text_key)
    with progress_bar() as progress:
        report = evaluate_model(
            options,
            data,
            names=names,
            tasks=further,
            cache=cache,
            query_prompt=query_prompt,
            document_prompt=document_prompt,
            teacher=teacher,
            mteb=mteb,
            announce=say,
            progress=progress,
        )
    scored = [*([] if data is None else nine_tasks(data, names)), *further]
    record: dict[str, Any] = finite(report.to_json()) | provenance(options, scored)
    if not meta("json"):
        from rich.console import Console

        Console().print(task_table({model: report}))
    emit(record, lambda: _lines(report))
    if output is not None:
        output.write_text(json.dumps(record, indent=2, allow_nan=False), encoding="utf-8")


def _check_modes(modes: tuple[str, ...], retrieval: tuple[Path, ...]) -> None:
    """Refuse modes that are none, and those of a retrieval that is not asked for."""
    from distill.evaluation.base import require_known
    from distill.evaluation.retrieval import MODES

    require_known(modes, MODES, "unknown mode")
    if modes and not retrieval:
        raise click.BadParameter("it is a mode of retrieval: say with --retrieval on which", param_hint="--mode")


def _teacher_source(given: dict[str, Any], cache: Path | None, dtype: str) -> "TeacherSource":
    """What the teacher's options say; they are taken out of `given`, which leaves how the model is asked."""
    from distill.evaluation.roles import TeacherSource
    from teacher_cache.teachers.base import TeacherOptions

    model, space = given.pop("teacher"), given.pop("space")
    if cache is not None:
        dtype = "auto"  # that of the teacher's space in the cache, where it has one
    runs = {name: given[name] for name in ("device", "attn_implementation", "trust_remote_code")}
    return TeacherSource(
        cache=cache,
        space=space,
        model=None if model is None else TeacherOptions(model=model, dtype=dtype, **runs),
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
    lines = [
        f"{name}: recall at 100 {task.extra['recall_at_100']:.1f}, MRR at 10 {task.extra['mrr_at_10']:.1f}, "
        f"{task.extra['queries']:,.0f} queries, {task.extra['documents']:,.0f} documents"
        for name, task in report.tasks.items()
        if "mrr_at_10" in task.extra
    ]
    lines += [
        f"{name}: overlap of the 10 nearest neighbours {task.extra['overlap']:.1f}, {task.extra['texts']:,.0f} texts"
        for name, task in report.tasks.items()
        if "overlap" in task.extra
    ]
    for name, task in report.tasks.items():
        if "error" in task.extra:
            lines += _approximation_lines(name, task)
    texts = f"{report.texts:,} distinct texts, each encoded once, in " if report.texts else ""
    return [*lines, f"{texts}{report.seconds:.0f} s"]


def _approximation_lines(name: str, task: "TaskScore") -> list[str]:
    """The errors of an approximation, and the texts that it is worst and best at, each cut to a line."""
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
