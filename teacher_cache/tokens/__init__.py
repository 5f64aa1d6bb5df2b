"""Token-level columns: what is asked of a teacher, how it is stored, how two tokenizers align."""
