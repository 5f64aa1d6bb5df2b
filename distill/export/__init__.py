"""Formats a trained student can leave in: one file a format, one line in the table."""

# name -> "module:function"; the function takes (student, projection, normalize, folder).
EXPORTS: dict[str, str] = {
    "sentence_transformer": "distill.export.sentence_transformer:export",
}
