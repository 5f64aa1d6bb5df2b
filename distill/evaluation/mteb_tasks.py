"""Tasks of the MTEB library, with the model's own prompts for each of them."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from distill.errors import ConfigError, EvaluationError
from distill.evaluation.base import DOCUMENT, QUERY, TEXT, Encoder, Progress, TaskScore, no_progress
from distill.evaluation.encoders import DOCUMENT_PROMPTS, ModelEncoder, ModelSlot, encode_all, options_by_role
from distill.registry import load_class
from teacher_cache.errors import optional_import
from teacher_cache.teachers import TeacherOptions, model_prompts, resolve, resolve_dtype

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.types import PromptType

# Texts per batch of MTEB's loaders; the model splits them further itself.
BATCH = 512


def run_mteb(
    options: TeacherOptions,
    names: Sequence[str],
    *,
    query_prompt: str | None = None,
    document_prompt: str | None = None,
    encoder_of: Callable[[TeacherOptions], Encoder] | None = None,
    progress: Progress = no_progress,
) -> dict[str, TaskScore]:
    """Scores of MTEB tasks by name: their main metric, averaged over splits and subsets as MTEB does, times 100.

    Loading a task's data writes to the cache of the datasets library and may use the network; nothing else does.
    """
    with optional_import("an MTEB task"):
        import mteb

    tasks = [_task(name) for name in names]
    encoder = MtebEncoder(options, query_prompt, document_prompt, encoder_of)
    scores = {}
    for task in tasks:
        name = task.metadata.name
        progress(f"MTEB {name}", 0, 0, "loading its data")
        try:
            task.load_data()
        except Exception as error:  # tasks load from a network or a file, with errors of any kind
            raise EvaluationError(f"mteb: the data of {name} cannot be loaded: {error}") from error
        progress(f"MTEB {name}", 0, 0, "encoding and scoring")
        start = time.perf_counter()
        # No cache: it stores results under a model's bare name, which students of several runs share.
        result = mteb.evaluate(
            encoder,
            task,
            cache=None,
            co2_tracker=False,
            show_progress_bar=False,
            encode_kwargs={"batch_size": BATCH, "show_progress_bar": False},
        )
        task.unload_data()
        score = 100 * float(result.task_results[0].get_score())
        if not math.isfinite(score):
            raise EvaluationError(f"mteb: {task.metadata.main_score} of {name} is not finite: {score}")
        scores[name] = TaskScore(
            metric=task.metadata.main_score, score=score, domain="apart", seconds=time.perf_counter() - start
        )
    return scores


class MtebEncoder:
    """A model with the interface of `mteb.models.EncoderProtocol`.

    The prompt of a text is, unless the options name one: the model's own for the task or the type of task, under the
    names that MTEB uses ("STS12", "Classification", "Retrieval-query"); else that of a query, a document or a plain
    text.
    """

    # MTEB stores results under this name, and sets a default if the attribute is missing.
    mteb_model_meta = None

    def __init__(
        self,
        options: TeacherOptions,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
        encoder_of: Callable[[TeacherOptions], Encoder] | None = None,
    ) -> None:
        self._options = options
        self._by_role = options_by_role(options, query_prompt, document_prompt)
        self._task_prompts: dict[str, str] = {}
        if options.prompt is None and options.prompt_name is None:
            by_role = {QUERY, *DOCUMENT_PROMPTS}
            self._task_prompts = {
                name: text for name, text in model_prompts(options).items() if text and name not in by_role
            }
        slot = ModelSlot()
        self._encoder_of = encoder_of or (lambda options: ModelEncoder(resolve_dtype(resolve(options)), slot))
        self._encoders: dict[TeacherOptions, Encoder] = {}

    def encode(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task_metadata: "TaskMetadata",
        hf_split: str,
        hf_subset: str,
        prompt_type: "PromptType | None" = None,
        **kwargs: Any,
    ) -> npt.NDArray[np.float32]:
        """`(n, d)` vectors of the texts of a loader's batches, each distinct one encoded once."""
        texts: list[str] = []
        for batch in inputs:
            if "text" not in batch:
                raise EvaluationError(f"mteb: {task_metadata.name} has {', '.join(batch)} and no texts to encode")
            texts += batch["text"]
        options = self.options_for(task_metadata, prompt_type)
        if options not in self._encoders:
            self._encoders[options] = self._encoder_of(options)
        rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        return encode_all(self._encoders[options], list(rows))[[rows[text] for text in texts]]

    def options_for(self, task_metadata: "TaskMetadata", prompt_type: "PromptType | None") -> TeacherOptions:
        """The model's options with the prompt for the texts of a task."""
        side = prompt_type.value if prompt_type is not None else ""
        for name in (task_metadata.name, str(task_metadata.type)):
            for own in (f"{name}-{side}", name):
                if own in self._task_prompts:
                    return replace(self._options, prompt=self._task_prompts[own])
        return self._by_role[{"query": QUERY, "document": DOCUMENT}.get(side, TEXT)]

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        from mteb.similarity_functions import cos_sim

        return cos_sim(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        from mteb.similarity_functions import pairwise_cos_sim

        return pairwise_cos_sim(embeddings1, embeddings2)


def _task(name: str) -> "AbsTask":
    import mteb
    from mteb.abstasks import AbsTask

    try:
        if ":" in name:
            return load_class(name, {}, "MTEB task", AbsTask)()
        return mteb.get_task(name)
    except ConfigError as error:
        raise EvaluationError(str(error)) from error
    except KeyError as error:
        # The message has the nearest task's name.
        raise EvaluationError(f"mteb: no such task: {str(error.args[0]).removeprefix('KeyError: ')}") from error
