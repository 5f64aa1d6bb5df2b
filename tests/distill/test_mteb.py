"""MTEB tasks: scores equal those computed from the model's vectors."""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from scipy.stats import spearmanr

from cli.distill import main
from distill.errors import EvaluationError
from distill.evaluation.base import cosine
from distill.evaluation.mteb_tasks import MtebEncoder, run_mteb
from teacher_cache.errors import MissingDependency
from teacher_cache.teachers import TeacherOptions
from tests.conftest import varied_texts
from tests.contracts.task_contract import text_vectors

mteb = pytest.importorskip("mteb", reason="mteb is not installed")

from datasets import Dataset, DatasetDict  # noqa: E402
from mteb.abstasks import AbsTaskRetrieval, AbsTaskSTS  # noqa: E402
from mteb.abstasks.task_metadata import TaskMetadata  # noqa: E402
from mteb.types import PromptType  # noqa: E402

TEXTS = varied_texts(40, seed=3)
SCORES = [(7 * i) % 11 / 2 for i in range(20)]


def metadata(name: str, kind: str, metric: str) -> TaskMetadata:
    return TaskMetadata(
        name=name,
        type=kind,
        main_score=metric,
        description="A few sentences.",
        dataset={"path": "none", "revision": "none"},
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        category="t2t",
        modalities=["text"],
        bibtex_citation="",
    )


class SmallSTS(AbsTaskSTS):
    metadata = metadata("SmallSTS", "STS", "cosine_spearman")

    def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
        columns = {"sentence1": TEXTS[:20], "sentence2": TEXTS[20:], "score": SCORES}
        self.dataset = DatasetDict({"test": Dataset.from_dict(columns)})
        self.data_loaded = True


class SmallRetrieval(AbsTaskRetrieval):
    metadata = metadata("SmallRetrieval", "Retrieval", "ndcg_at_10")

    def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
        split = {
            "queries": Dataset.from_list([{"id": f"q{i}", "text": TEXTS[i]} for i in range(5)]),
            "corpus": Dataset.from_list([{"id": f"d{i}", "title": "", "text": TEXTS[i]} for i in range(5, 40)]),
            "relevant_docs": {f"q{i}": {f"d{5 + i}": 1} for i in range(5)},
            "top_ranked": None,
        }
        self.dataset = {"default": {"test": split}}
        self.data_loaded = True


class LostSTS(SmallSTS):
    metadata = metadata("LostSTS", "STS", "cosine_spearman")

    def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
        raise ConnectionError("no way to the data")


class Prompted:
    """Vectors of prompt and text, and the texts encoded with each prompt."""

    def __init__(self) -> None:
        self.asked: dict[str, list[str]] = {}

    def __call__(self, options: TeacherOptions) -> "OnePrompt":
        return OnePrompt(options.prompt or "", self.asked.setdefault(options.prompt or "", []))


class OnePrompt:
    def __init__(self, prompt: str, asked: list[str]) -> None:
        self.prompt = prompt
        self.asked = asked

    def encode(self, texts: Sequence[str], /) -> npt.NDArray[np.float32]:
        self.asked += texts
        return text_vectors([self.prompt + text for text in texts])


TOY = TeacherOptions(model="toy", dtype="float32")


def test_the_score_of_an_sts_task_equals_scipys() -> None:
    score = run_mteb(TOY, ["tests.distill.test_mteb:SmallSTS"], encoder_of=Prompted())["SmallSTS"]
    cosines = cosine(text_vectors(TEXTS[:20]), text_vectors(TEXTS[20:]))
    assert score.metric == "cosine_spearman"
    assert score.score == pytest.approx(100 * spearmanr(cosines, SCORES).statistic, abs=1e-4)
    assert score.domain == "apart"


def test_queries_and_documents_are_encoded_with_their_own_prompts() -> None:
    encoders = Prompted()
    scores = run_mteb(
        TOY, ["tests.distill.test_mteb:SmallRetrieval"], query_prompt="q: ", document_prompt="d: ", encoder_of=encoders
    )
    assert sorted(encoders.asked["q: "]) == sorted(TEXTS[:5])
    assert sorted(text.strip() for text in encoders.asked["d: "]) == sorted(TEXTS[5:])
    queries, documents = text_vectors([f"q: {t}" for t in TEXTS[:5]]), text_vectors([f"d: {t}" for t in TEXTS[5:]])
    similar = np.stack([cosine(np.repeat(query[None], 35, axis=0), documents) for query in queries])
    ranks = [int((row > row[i]).sum()) for i, row in enumerate(similar)]
    gains = [1 / np.log2(rank + 2) if rank < 10 else 0.0 for rank in ranks]
    assert scores["SmallRetrieval"].score == pytest.approx(100 * np.mean(gains), abs=1e-3)


def test_models_are_loaded_through_the_teacher_backends() -> None:
    from teacher_cache.teachers import load_teacher, resolve

    score = run_mteb(TOY, ["tests.distill.test_mteb:SmallSTS"])["SmallSTS"].score
    toy = load_teacher(resolve(TOY))
    expected = spearmanr(cosine(toy.encode(TEXTS[:20]), toy.encode(TEXTS[20:])), SCORES).statistic
    assert score == pytest.approx(100 * expected, abs=1e-4)


@pytest.fixture
def prompted_model(tiny_student: Path, tmp_path: Path) -> TeacherOptions:
    folder = tmp_path / "model"
    shutil.copytree(tiny_student, folder)
    prompts = {
        "SmallSTS": "same: ",
        "Retrieval-query": "find: ",
        "query": "ask: ",
        "passage": "read: ",
        "STS": "kind: ",
    }
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    return TeacherOptions(model=str(folder), dtype="float32")


@pytest.mark.parametrize(
    ("task", "side", "prompt"),
    [
        (SmallSTS, None, "same: "),
        (LostSTS, None, "kind: "),
        (SmallRetrieval, PromptType.query, "find: "),
        (SmallRetrieval, PromptType.document, "read: "),
        (SmallSTS, PromptType.query, "same: "),
    ],
)
def test_the_prompt_of_the_task_precedes_that_of_its_type_and_of_the_side(
    prompted_model: TeacherOptions, task: Any, side: PromptType | None, prompt: str
) -> None:
    assert MtebEncoder(prompted_model).options_for(task.metadata, side).prompt == prompt


def test_a_given_prompt_is_used_for_every_task(prompted_model: TeacherOptions) -> None:
    from dataclasses import replace

    encoder = MtebEncoder(replace(prompted_model, prompt="mine: "))
    assert encoder.options_for(SmallSTS.metadata, None).prompt == "mine: "
    assert encoder.options_for(SmallRetrieval.metadata, PromptType.query).prompt == "mine: "


def test_mteb_accepts_it_as_an_encoder() -> None:
    from mteb.models import EncoderProtocol

    assert isinstance(MtebEncoder(TOY), EncoderProtocol)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("STS13x", "no such task: 'STS13x'.*'STS13'"),
        ("no_such_module:Task", "MTEB task: found no module 'no_such_module'"),
        ("pathlib:Path", "MTEB task: .* must name a subclass of mteb"),
        ("tests.distill.test_mteb:LostSTS", "the data of LostSTS cannot be loaded: no way to the data"),
    ],
)
def test_a_task_that_cannot_be_run_is_an_error_with_its_name(name: str, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        run_mteb(TOY, [name], encoder_of=Prompted())


def test_images_are_an_error() -> None:
    with pytest.raises(EvaluationError, match="SmallSTS has image and no texts"):
        MtebEncoder(TOY).encode([{"image": [0]}], task_metadata=SmallSTS.metadata, hf_split="test", hf_subset="default")


def test_without_mteb_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mteb", None)
    with pytest.raises(MissingDependency, match=r"teacher-cache\[mteb\]"):
        run_mteb(TOY, ["STS12"])


def test_no_result_is_written_to_the_users_mteb_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MTEB_CACHE", str(tmp_path / "results"))
    run_mteb(TOY, ["tests.distill.test_mteb:SmallSTS"], encoder_of=Prompted())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_command_runs_mteb_with_other_tasks_and_caches_the_vectors(tmp_path: Path) -> None:
    (tmp_path / "faq.csv").write_text("sentence1,sentence2,score\na cat,the cat,4\na cat,a train,1\na dog,a sea,2\n")
    (tmp_path / "tasks.yaml").write_text("faq: {kind: sts, file: faq.csv}\n")
    task, cache = "tests.distill.test_mteb:SmallSTS", str(tmp_path / "cache")
    asked = [
        "eval",
        "toy",
        "--dtype",
        "fp32",
        "--tasks-file",
        str(tmp_path / "tasks.yaml"),
        "--mteb",
        task,
        "--cache",
        cache,
        "--json",
    ]
    records = []
    for _ in range(2):
        done = CliRunner().invoke(main, asked)
        assert done.exit_code == 0, done.output
        records.append(json.loads(done.stdout)["tasks"])
    assert list(records[0]) == ["faq", "SmallSTS"]
    assert records[0] == records[1]
    assert "lacks" not in done.stderr
    assert records[0]["SmallSTS"]["score"] == pytest.approx(run_mteb(TOY, [task])["SmallSTS"].score, abs=1e-3)


# mteb's own wrapper uses deprecated interfaces of both libraries.
@pytest.mark.filterwarnings("ignore:The fill_missing parameter:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*get_sentence_embedding_dimension:FutureWarning")
@pytest.mark.parametrize("task", [SmallSTS, SmallRetrieval])
def test_a_real_model_scores_as_with_mteb_and_sentence_transformers(minilm: Path, task: Any) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm), device="cpu")
    theirs = mteb.evaluate(model, task(), cache=None, co2_tracker=False, show_progress_bar=False)
    options = TeacherOptions(model=str(minilm), dtype="float32", device="cpu")
    (ours,) = run_mteb(options, [f"tests.distill.test_mteb:{task.__name__}"]).values()
    assert ours.score == pytest.approx(100 * theirs.task_results[0].get_score(), abs=0.01)
