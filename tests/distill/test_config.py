from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.config import RunConfig
from distill.errors import ConfigError


def refused(*overrides: str, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        RunConfig.load(path, overrides)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_file_and_overrides_become_one_configuration(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("cache: c\nstudent: {model: m, pooling: cls}\ntraining:\n  seed: 7\n  save_steps: 10\n")
    config = RunConfig.load(path, ["student.pooling=mean", "training.save-steps=20", "objective.options.depth=2"])
    assert (config.cache, config.student.model, config.student.pooling) == ("c", "m", "mean")
    assert (config.training.seed, config.training.save_steps) == (7, 20)
    assert config.objective.options == {"depth": 2}
    assert config.training.learning_rate == 4e-4  # a default stays


@pytest.mark.parametrize("text", ["1e-4", "0.0001", "1.0e-4"])
def test_any_number_notation_becomes_a_float(text: str) -> None:
    rate = RunConfig.load(None, [f"training.learning_rate={text}"]).training.learning_rate
    assert isinstance(rate, float)
    assert rate == 1e-4


def test_a_folder_named_by_a_number_is_a_string() -> None:
    assert RunConfig.load(None, ["output_dir=2024"]).output_dir == "2024"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("query: ", "query: "), ("00012345", "00012345"), ("the old ", "the old "), ("'x: '", "x: "), ("", "")],
)
def test_a_string_is_taken_literally_unless_quoted(text: str, expected: str) -> None:
    assert RunConfig.load(None, [f"student.prompt={text}"]).student.prompt == expected


def test_null_resets_a_string(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("space: e5\nstudent:\n  prompt:\n")
    config = RunConfig.load(tmp_path / "run.yaml", ["space=null"])
    assert config.space is None
    assert config.student.prompt == ""


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("# nothing yet\n")
    assert RunConfig.load(tmp_path / "run.yaml") == RunConfig()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.learning_rat=1", "no setting 'training.learning_rat'; did you mean training.learning_rate?"),
        ("studnet.model=x", "no setting 'studnet'; did you mean student?"),
        ("learning_rate=2e-4", "no setting 'learning_rate'; did you mean training.learning_rate?"),
        ("training.rho=0.1", "no setting 'training.rho'; did you mean sharpness.rho?"),
        ("learning_rte=2e-4", "did you mean training.learning_rate?"),
        ("training.held_ot=1", "did you mean data.held_out?"),
        ("data.batch_size=8", "did you mean training.per_device_train_batch_size?"),
        ("epochs=3", "did you mean training.num_train_epochs?"),
        ("data.model=x", "did you mean teacher.model or student.model?"),
        ("zzz=1", "no setting 'zzz'; known here: cache, space, corpus"),
        ("training.max_steps=many", "training.max_steps is 'many'; expected int"),
        ("training.max_steps=1.5", "training.max_steps is 1.5; expected int"),
        ("training.learning_rate=high", "training.learning_rate is 'high'; expected float"),
        ("data.drop_last=1", "data.drop_last is 1; expected bool"),
        ("training.seed=true", "training.seed is True; expected int"),
        ("student.max_length=long", "student.max_length is 'long'; expected int or null"),
        ("objective.options=3", "objective.options is 3; expected keys and values"),
        ("student=bert", "student: expected keys and values, found 'bert'"),
        ("training.seed.x=1", "seed is 1"),
        ("training", "override 'training' is not of the form key=value"),
        ("training.seed=[1", "override training.seed: '[1' is not a YAML value"),
    ],
)
def test_an_unknown_key_or_wrong_value_is_named(override: str, expected: str) -> None:
    if override == "training.seed.x=1":
        message = refused("training.seed=1", override)
        assert message == "override training.seed.x: seed is 1, not a group of keys"
    else:
        assert expected in refused(override)


@pytest.mark.parametrize(
    "override",
    [
        "training.per_device_train_batch_size=1",
        "training.gradient_accumulation_steps=0",
        "training.learning_rate=-1",
        "training.learning_rate=nan",
        "training.head_learning_rate=inf",
        "training.weight_decay=-0.1",
        "training.warmup_ratio=1.5",
        "training.min_lr_rate=-0.1",
        "training.max_grad_norm=-1",
        "training.max_steps=0",
        "training.num_train_epochs=0",
        "training.save_steps=0",
        "training.save_total_limit=0",
        "training.logging_steps=0",
        "training.seed=-1",
        "training.dataloader_num_workers=-1",
        "training.precision=int8",
        "data.window=31",
        "data.held_out=-1",
    ],
)
def test_a_value_out_of_range_names_its_key(override: str) -> None:
    key, _, value = override.partition("=")
    message = refused(override)
    assert message.startswith(f"{key} is ")
    assert value in message.replace("'", "")
    assert "expected" in message


def test_epochs_are_ignored_when_steps_are_given() -> None:
    assert RunConfig.load(None, ["training.max_steps=5", "training.num_train_epochs=0"]).training.max_steps == 5


@pytest.mark.parametrize(
    ("name", "key"),
    [("seed", "training.seed"), ("fp16", "training.precision"), ("output_dir", "output_dir")],
)
def test_training_arguments_cannot_override_keys(name: str, key: str) -> None:
    message = refused(f"training.arguments.{name}=1")
    assert message == f"training.arguments.{name} has its own key; set {key} instead"


def test_an_unreadable_file_is_one_line(tmp_path: Path) -> None:
    absent = tmp_path / "absent.yaml"
    assert str(absent) in refused(path=absent)
    broken = tmp_path / "broken.yaml"
    broken.write_text("training: [1,\n  2\n")
    assert refused(path=broken) == (
        f"configuration {broken} is not YAML: line 2: expected ',' or ']', but got '<stream end>' near '2'"
    )
    broken.write_text("cache: c\ntraining:\n  seed: 1\n  rate: a: b\nspace: s\n")
    assert "line 4: mapping values are not allowed here near 'rate: a: b'" in refused(path=broken)
    misspelled = tmp_path / "misspelled.yaml"
    misspelled.write_text("student: {model: m}\nlearning_rate: 2e-4\n")
    assert "no setting 'learning_rate'; did you mean training.learning_rate?" in refused(path=misspelled)
    listed = tmp_path / "list.yaml"
    listed.write_text("- 1\n- 2\n")
    assert "expected keys and values, found a list" in refused(path=listed)
    (tmp_path / "latin.yaml").write_bytes(b"cache: caf\xe9\n")
    assert "is not YAML" in refused(path=tmp_path / "latin.yaml")


def names() -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12)


def values() -> st.SearchStrategy[Any]:
    return st.one_of(st.booleans(), st.integers(-5, 5), st.floats(-1, 1), names())


@settings(deadline=None)  # writes a file
@given(names(), st.none() | names(), st.floats(0, 1e3), st.dictionaries(names(), values(), max_size=4))
def test_to_yaml_round_trips(
    tmp_path_factory: pytest.TempPathFactory, prompt: str, space: str | None, rate: float, options: dict[str, Any]
) -> None:
    import dataclasses

    base = RunConfig()
    config = dataclasses.replace(
        base,
        space=space,
        student=dataclasses.replace(base.student, prompt=prompt),
        objective=dataclasses.replace(base.objective, options=options),
        training=dataclasses.replace(base.training, learning_rate=rate),
    )
    path = tmp_path_factory.mktemp("yaml") / "run.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    again = RunConfig.load(path)
    assert again == config
    assert again.difference(config) == {}


def test_a_difference_names_dotted_keys_and_both_values() -> None:
    mine = RunConfig.load(None, ["training.seed=1", "objective.options.depth=2"])
    theirs = RunConfig.load(None, ["training.seed=3", "student.pooling=cls"])
    assert mine.difference(theirs) == {
        "training.seed": (1, 3),
        "student.pooling": (None, "cls"),
        "objective.options.depth": (2, None),
    }


@pytest.mark.parametrize("name", ["save_only_model", "dataloader_drop_last", "data_seed", "group_by_length"])
def test_an_unsupported_argument_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"training.arguments.{name} cannot be used"):
        RunConfig.load(None, [f"training.arguments.{name}=true"])


def test_a_space_is_named_by_its_fields() -> None:
    whole = RunConfig.load(None, ["space={teacher: toy, dims: 8}"])
    single = RunConfig.load(None, ["space.teacher=toy", "space.dims=8"])
    assert whole.space == single.space == {"teacher": "toy", "dims": 8}
    assert RunConfig.load(None, ["space.prompt=query: "]).space == {"prompt": "query: "}
    assert RunConfig.load(None, ["space=toy@12345678"]).space == "toy@12345678"


def test_a_window_of_0_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.window is 0; expected at least 32"):
        RunConfig.load(None, ["data.window=0"])
    assert RunConfig().window(tokens=False) == 16384
    assert RunConfig().window(tokens=True) == 1024
