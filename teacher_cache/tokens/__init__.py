"""Token-level teacher outputs: requests, storage, and alignment of two tokenizers."""
