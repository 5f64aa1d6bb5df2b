"""Export of vectors to formats of other tools, and their import: one module per format, one line in the table."""

# name -> module with SUFFIX (of a file; "" for a folder), LIBRARY (optional library it needs, or ""),
# write(target, blocks, origin, rows) and read(source, options).
EXPORT_FORMATS: dict[str, str] = {
    "npy": "teacher_cache.transfer.npy",
    "parquet": "teacher_cache.transfer.parquet",
    "hf-dataset": "teacher_cache.transfer.hf_dataset",
}
