"""The key of a text: 16 bytes of a hash of its exact UTF-8.

No Unicode normalization, case folding or stripping: a cased teacher has different vectors for "Paris" and "paris",
and for composed and decomposed accents. BLAKE2b with a 128-bit digest: with 10^9 texts the chance of any collision is
about 10^-21.
"""

from collections.abc import Iterable
from hashlib import blake2b

KEY_BYTES = 16
KEY_RULE = "blake2b-128 of the exact UTF-8"


def text_key(text: str) -> bytes:
    """The 16-byte key of `text`.

    Raises:
        UnicodeEncodeError: `text` has a lone surrogate; `Corpus` replaces these.
    """
    return blake2b(text.encode("utf-8"), digest_size=KEY_BYTES).digest()


def text_keys(texts: Iterable[str]) -> list[bytes]:
    """`text_key` of each text, in order."""
    return [text_key(text) for text in texts]
