"""Tasks of the MTEB library, asked of a model with the prompts that are its own for each of them."""

import importlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from distill.errors import EvaluationError
from distill.evaluation.base import DOCUMENT, QUERY, TEXT, Encoder, TaskScore
from distill.evaluation.encoders import DOCUMENT_PROMPTS, ModelEncoder, Room, asked_by_role, encode_all
from teacher_cache.errors import optional_import
from teacher_cache.teachers import TeacherOptions, prompts_of, resolve, resolve_dtype

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.types import PromptType

# Texts in one batch of MTEB's loaders; how many the model takes at a time is the model's affair.
BATCH = 512


def run_mteb(
    options: TeacherOptions,
    names: Sequence[str],
    *,
    query_prompt: str | None = None,
    document_prompt: str | None = None,
    encoder_of: Callable[[TeacherOptions], Encoder] | None = None,
    announce: Callable[[str], None] = lambda line: None,
) -> dict[str, TaskScore]:
    """Scores of MTEB tasks by name: their main metric, averaged over splits and subsets as MTEB does, times 100.

    Nothing is written but what the loading of a task's data keeps in the cache of the datasets library; only that
    loading uses a network.

    Args:
        options: which model and how it is asked; vectors are compared by their cosine.
        names: of MTEB's tasks, or "package.module:Class" for a task class of one's own.
        query_prompt, document_prompt: as `asked_by_role` takes them.
        encoder_of: gives the vectors of the model asked in one way; by default the model itself, keeping nothing.

    Raises:
        EvaluationError: an unknown task, data that cannot be loaded, or a task that is not of texts.
        MissingDependency: mteb is absent.
    """
    with optional_import("an MTEB task"):
        import mteb

    tasks = [_task(name) for name in names]
    encoder = MtebEncoder(options, query_prompt, document_prompt, encoder_of)
    scores = {}
    for task in tasks:
        name = task.metadata.name
        announce(f"mteb: {name}, loading its data")
        try:
            task.load_data()
        except Exception as error:  # every task loads in its own way, from a network or a file
            raise EvaluationError(f"mteb: the data of {name} cannot be loaded: {error}") from error
        start = time.perf_counter()
        # No cache: results under a model's bare name would be taken for those of another student.
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
            raise EvaluationError(f"mteb: {name} gave no finite {task.metadata.main_score}: {score}")
        scores[name] = TaskScore(
            metric=task.metadata.main_score, score=score, domain="apart", seconds=time.perf_counter() - start
        )
    return scores


class MtebEncoder:
    """A model as `mteb.models.EncoderProtocol` has it.

    The prompt of a text is, where the options name none: the model's own for the task or the type of task, by the
    names that MTEB gives them ("STS12", "Classification", "Retrieval-query"); else that of a query, a document or a
    plain text, as everywhere here.
    """

    # MTEB asks for the name under which it would keep results, and puts one of its own where there is none.
    mteb_model_meta = None

    def __init__(
        self,
        options: TeacherOptions,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
        encoder_of: Callable[[TeacherOptions], Encoder] | None = None,
    ) -> None:
        self._options = options
        self._asked = asked_by_role(options, query_prompt, document_prompt)
        self._own: dict[str, str] = {}
        if options.prompt is None and options.prompt_name is None:
            by_role = {QUERY, *DOCUMENT_PROMPTS}
            self._own = {name: text for name, text in prompts_of(options).items() if text and name not in by_role}
        self._encoder_of = encoder_of or _loading(Room())
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
        """`(n, d)` vectors of the texts of a loader's batches, each distinct one asked for once.

        Raises:
            EvaluationError: a batch has no texts.
        """
        texts: list[str] = []
        for batch in inputs:
            if "text" not in batch:
                raise EvaluationError(f"mteb: {task_metadata.name} has {', '.join(batch)} and no texts to encode")
            texts += batch["text"]
        asked = self.asked_for(task_metadata, prompt_type)
        if asked not in self._encoders:
            self._encoders[asked] = self._encoder_of(asked)
        rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        return encode_all(self._encoders[asked], list(rows))[[rows[text] for text in texts]]

    def asked_for(self, task_metadata: "TaskMetadata", prompt_type: "PromptType | None") -> TeacherOptions:
        """How the model is asked for the texts of a task."""
        side = prompt_type.value if prompt_type is not None else ""
        for name in (task_metadata.name, str(task_metadata.type)):
            for own in (f"{name}-{side}", name):
                if own in self._own:
                    return replace(self._options, prompt=self._own[own])
        return self._asked[{"query": QUERY, "document": DOCUMENT}.get(side, TEXT)]

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        from mteb.similarity_functions import cos_sim

        return cos_sim(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        from mteb.similarity_functions import pairwise_cos_sim

        return pairwise_cos_sim(embeddings1, embeddings2)


def _loading(room: Room) -> Callable[[TeacherOptions], Encoder]:
    return lambda options: ModelEncoder(resolve_dtype(resolve(options)), room)


def _task(name: str) -> "AbsTask":
    import mteb
    from mteb.abstasks import AbsTask

    module, colon, class_name = name.partition(":")
    if colon:
        try:
            found = getattr(importlib.import_module(module), class_name)
        except (ModuleNotFoundError, AttributeError) as error:
            raise EvaluationError(f"mteb: task {name!r} cannot be imported: {error}") from error
        if not (isinstance(found, type) and issubclass(found, AbsTask)):
            raise EvaluationError(f"mteb: task {name!r} is not a subclass of mteb's AbsTask")
        return found()
    try:
        return mteb.get_task(name)
    except KeyError as error:
        # What it says names the nearest task.
        raise EvaluationError(f"mteb: no such task: {str(error.args[0]).removeprefix('KeyError: ')}") from error
