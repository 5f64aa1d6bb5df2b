"""The model card of an exported student: what it is, which space its vectors live in, with what figures."""

from collections.abc import Mapping
from typing import Any


def model_card(record: Mapping[str, Any]) -> str:
    """README.md for a `final/` folder, from the record that the run keeps in `run.json`.

    Args:
        record: `student`, `space`, `corpus`, `objective`, `sharpness`, `training`, `export`, `agreement`,
            `versions`, as `distill.run` writes them.
    """
    space, corpus, student = record["space"], record["corpus"], record["student"]
    projected = record["export"]["projection"]
    lives_in = (
        f"The vectors ({space['dims']} numbers) live in the teacher's space `{space['slug']}`: they can be "
        "compared with the teacher's own."
        if projected
        else f"The vectors ({student['dim']} numbers) live in the student's own space, which was shaped "
        f"after the teacher's `{space['slug']}`; do not compare them with the teacher's vectors."
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
        lives_in,
        "",
        "```python",
        "from sentence_transformers import SentenceTransformer",
        "",
        'model = SentenceTransformer("path/to/this/folder")',
        'model.encode(["A sentence."])',
        "```",
        "",
        "| | |",
        "|---|---|",
        f"| Teacher | {space['teacher']} {space['revision']} |",
        f"| Teacher's space | {space['description']} |",
        f"| Space fingerprint | `{space['fingerprint']}` |",
        f"| Student | {student['name']}: {student['layers']} layers, width {student['dim']}, "
        f"{student['parameters'] / 1e6:.1f} M parameters |",
        f"| Pooling, longest input | {student['pooling']}, {student['max_length']} tokens |",
        f"| Prompt | {student['prompt']!r} |" if student["prompt"] else "| Prompt | none |",
        f"| Corpus | {corpus['name']}: {corpus['records']:,} records, {corpus['distinct']:,} distinct texts, "
        f"digest `{corpus['fingerprint']}` |",
        f"| Method | {record['objective']['name']}, sharpness {record['sharpness']['name']} |",
        f"| Training | {record['steps']:,} steps of {record['training']['per_device_train_batch_size']} "
        f"records, learning rate {record['training']['learning_rate']:g}, {record['precision']}, seed "
        f"{record['training']['seed']} |",
        "",
    ]
    agreement = record.get("agreement")
    if agreement:
        before, after = agreement["before"], agreement["after"]
        lines += [
            f"Agreement of these vectors with the teacher's on {after['texts']} texts that were not trained on:",
            "",
            "| | before | after |",
            "|---|---|---|",
            f"| Spearman of pairwise cosines | {before['spearman']:.4f} | {after['spearman']:.4f} |",
            f"| Overlap of the {after['neighbours']} nearest neighbours | {before['overlap']:.4f} | "
            f"{after['overlap']:.4f} |",
            "",
        ]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines += [f"Made with {versions}.", ""]
    return "\n".join(lines)
