"""The model card of an exported student: model, space, training and agreement with the teacher."""

from collections.abc import Mapping
from typing import Any

# How a folder is loaded.
LOADING = (
    "```python",
    "from sentence_transformers import SentenceTransformer",
    "",
    'model = SentenceTransformer("path/to/this/folder")',
    'model.encode(["A sentence."])',
    "```",
)


def model_card(record: Mapping[str, Any]) -> str:
    """README.md of a `final/` folder, from the record in `run.json`."""
    space, corpus, student = record["space"], record["corpus"], record["student"]
    vectors = (
        f"The vectors ({space['dims']} dimensions) are in the teacher's space `{space['slug']}`: they can be compared "
        "with the teacher's."
        if record["in_teacher_space"]
        else f"The vectors ({student['dim']} dimensions) are in the student's own space, trained on the teacher's "
        f"`{space['slug']}`; they cannot be compared with the teacher's vectors."
    )
    lines = [
        "---",
        "library_name: sentence-transformers",
        "pipeline_tag: sentence-similarity",
        "tags: [sentence-transformers, feature-extraction, distillation]",
        "---",
        "",
        f"# {student['name']} distilled from {space['teacher']}",
        "",
        vectors,
        "",
        *LOADING,
        "",
        "| | |",
        "|---|---|",
        f"| Teacher | {space['teacher']} {space['revision']} |",
        f"| Teacher's space | {space['description']} |",
        f"| Space fingerprint | `{space['fingerprint']}` |",
        f"| Student | {student['name']}: {_architecture(student)}, {student['parameters'] / 1e6:.1f} M parameters |",
        f"| Pooling, longest input | {student['pooling']}, {student['max_length']} tokens |",
        f"| Prompt | {student['prompt']!r} |" if student["prompt"] else "| Prompt | none |",
        f"| Corpus | {corpus['name']}: {corpus['records']:,} records, {corpus['distinct']:,} distinct texts, "
        f"digest `{corpus['fingerprint']}` |",
        f"| Method | {_method(record)} |",
        f"| Training | {record['steps']:,} steps of {record['training']['per_device_train_batch_size']} "
        f"records, learning rate {record['training']['learning_rate']:g}, {record['precision']}, seed "
        f"{record['training']['seed']} |",
        *_chosen(record),
        "",
    ]
    agreement = record.get("agreement")
    if agreement:
        columns = [name for name in ("before", "after", "projected") if agreement[name]]
        figures = agreement["before"]
        names = {"before": "before training", "after": "after", "projected": "after, projected"}
        lines += [
            f"Agreement of the student's own vectors with the teacher's on {figures['texts']} held-out texts:",
            "",
            f"| | {' | '.join(names[name] for name in columns)} |",
            f"|---|{'---|' * len(columns)}",
            _row("Spearman of pairwise cosines", [agreement[name]["spearman"] for name in columns]),
            _row(
                f"Overlap of the {figures['neighbours']} nearest neighbors", [agreement[n]["overlap"] for n in columns]
            ),
            "",
        ]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines += [f"Made with {versions}.", ""]
    return "\n".join(lines)


def static_card(model: str, pooling: str, max_length: int, record: Mapping[str, Any]) -> str:
    """README.md of a static student before training, from a `StaticResult`."""
    frequencies = {
        "corpus": f"smooth inverse frequency, a = {record['sif']:g}, from {record['counted_tokens']:,} tokens",
        "token ids": f"smooth inverse frequency, a = {record['sif']:g}, by Zipf's law over token ids",
        "none": "none",
    }
    return "\n".join(
        [
            "---",
            "library_name: sentence-transformers",
            "pipeline_tag: sentence-similarity",
            "tags: [sentence-transformers, feature-extraction, static-embeddings, model2vec]",
            "---",
            "",
            f"# Static embeddings from {model}",
            "",
            f"A table of {record['vocabulary']:,} token vectors of width {record['dims']}. The vector of a text is the "
            "mean of its tokens' rows, scaled to length 1; word order and context have no influence. It was not "
            "trained. A text without a known token has the vector 0.",
            "",
            *LOADING,
            "",
            "| | |",
            "|---|---|",
            f"| Model | {model}, every token alone between its special tokens, {pooling} pooling |",
            f"| PCA | {record['dims']} dimensions, {record['explained_variance']:.1%} of the variance |",
            f"| Token weights | {frequencies[record['weights']]} |",
            f"| Longest input | {max_length} tokens |",
            "",
        ]
    )


def _architecture(student: Mapping[str, Any]) -> str:
    if student["layers"]:
        return f"{student['layers']} layers, width {student['dim']}"
    return f"static, a table of token vectors of width {student['dim']}"


def _method(record: Mapping[str, Any]) -> str:
    """Objective with its options, and sharpness."""
    objective, sharpness = record["objective"], record["sharpness"]
    preset = f", preset {objective['preset']}" if objective.get("preset") else ""
    options = "".join(f", {name} {value}" for name, value in (objective.get("options") or {}).items())
    return f"{objective['name']}{preset}{options}; sharpness {sharpness['name']}"


def _chosen(record: Mapping[str, Any]) -> list[str]:
    """The step of the exported student, if validation chose it."""
    validation, step = record.get("validation"), (record.get("exported") or {}).get("step")
    if not validation or validation["keep"] != "best":
        return []
    average = next(point["validation"]["average"] for point in validation["points"] if point["step"] == step)
    files = ", ".join(validation["files"])
    return [f"| Chosen by validation | step {step:,}, average {average:.2f} on {files} |"]


def _row(what: str, values: list[float]) -> str:
    return f"| {what} | {' | '.join(f'{value:.4f}' for value in values)} |"
