"""Vectors out of a cache in formats that other tools read, and back in: one file a format, one line in the table."""

# name -> module with SUFFIX (what a file's name ends with, "" for a folder), LIBRARY (what it needs, "" for
# nothing), write(target, blocks, exported) and read(source, asked).
EXPORT_FORMATS: dict[str, str] = {
    "npy": "teacher_cache.transfer.npy",
    "parquet": "teacher_cache.transfer.parquet",
    "hf-dataset": "teacher_cache.transfer.hf_dataset",
}
