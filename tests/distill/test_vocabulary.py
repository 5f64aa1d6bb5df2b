"""Students whose vocabulary is cut to the tokens of a corpus."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast, RobertaConfig, RobertaModel

from distill.errors import StudentError
from distill.student.student import Student
from distill.student.vocabulary import (
    KeptTokens,
    choose_tokens,
    count_tokens,
    cut_content,
    cut_vocabulary,
    token_ids,
)
from tests.conftest import varied_texts

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def student_with(core: Tokenizer, *, roberta: bool = False, pad: str = "[PAD]", **named: str) -> Student:
    """A random one-layer student with this tokenizer."""
    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=pad, **named)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer) + 3,  # models may have more rows than tokens
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 130,
        "pad_token_id": tokenizer.pad_token_id,
    }
    encoder = RobertaModel(RobertaConfig(**sizes)) if roberta else BertModel(BertConfig(**sizes))
    return Student(encoder.eval(), tokenizer, pooling="mean", max_length=64)


def template(core: Tokenizer) -> Any:
    return processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, core.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    )


def wordpiece(corpus: Sequence[str]) -> Student:
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.train_from_iterator(corpus, trainers.WordPieceTrainer(vocab_size=90, special_tokens=SPECIAL))
    core.post_processor = template(core)
    return student_with(core, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")


def bpe(corpus: Sequence[str], *, ignore_merges: bool = False) -> Student:
    """A byte-level tokenizer as RoBERTa's."""
    core = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<s>", "<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(corpus, trainer)
    core.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return student_with(core, roberta=True, pad="<pad>", bos_token="<s>", eos_token="</s>")


def bpe_of_whole_words(corpus: Sequence[str]) -> Student:
    """As `bpe`, but words in the vocabulary are not merged from parts, as in Llama 3."""
    return bpe(corpus, ignore_merges=True)


def unigram(corpus: Sequence[str]) -> Student:
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=SPECIAL, unk_token="[UNK]")
    core.train_from_iterator(corpus, trainer)
    core.post_processor = template(core)
    return student_with(core, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")


CORPUS = [*varied_texts(80), "unusual words: zeppelin, xylophone & quartz!", "naïve café"]
STUDENTS = {kind.__name__: kind(CORPUS) for kind in (wordpiece, bpe, bpe_of_whole_words, unigram)}
WORDS = [word for text in CORPUS for word in text.split()]


def content_of(student: Student) -> dict[str, Any]:
    tokenizer: Any = student.tokenizer
    content: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return content


@pytest.mark.parametrize("kind", STUDENTS)
@given(
    counted=st.lists(st.sampled_from(CORPUS), min_size=1, max_size=4),
    keep=st.one_of(st.none(), st.integers(1, 60)),
    words=st.lists(st.sampled_from([*WORDS, "ζ", "🙂", "[MASK]"]), min_size=1, max_size=8),
)
@settings(max_examples=20, deadline=None)
def test_texts_whose_tokens_are_kept_have_the_same_tokens(
    kind: str, counted: list[str], keep: int | None, words: list[str]
) -> None:
    student = STUDENTS[kind]
    kept = choose_tokens(student, count_tokens(student, [counted]), keep)
    cut = cut_vocabulary(student, kept)
    new = kept.new_ids(len(student.tokenizer))
    texts = [" ".join(words), *counted]
    for old, ids in zip(token_ids(student.tokenizer, texts), token_ids(cut.tokenizer, texts), strict=True):
        if (new[old] >= 0).all():
            assert kept.old_ids[ids].tolist() == old
    if keep is None:
        assert all((new[old] >= 0).all() for old in token_ids(student.tokenizer, counted))


@pytest.mark.parametrize("kind", STUDENTS)
def test_a_smaller_vocabulary_gives_the_same_vectors_also_after_loading(kind: str, tmp_path: Path) -> None:
    student, texts = STUDENTS[kind], CORPUS[:6]
    kept = choose_tokens(student, count_tokens(student, [texts]))
    cut = cut_vocabulary(student, kept)
    encoder: Any = cut.encoder
    assert len(cut.tokenizer) == encoder.config.vocab_size == len(kept.old_ids) < len(student.tokenizer)
    assert np.allclose(cut.encode(texts), student.encode(texts), atol=1e-6)
    cut.save_encoder(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert token_ids(loaded, CORPUS) == token_ids(cut.tokenizer, CORPUS)
    assert loaded.pad_token_id == cut.tokenizer.pad_token_id == encoder.config.pad_token_id


def test_wordpiece_keeps_tokens_seen_special_tokens_and_characters() -> None:
    vocab = {name: i for i, name in enumerate([*SPECIAL, "a", "##a", "b", "##b", "ab", "abba", "##ba", "[unused]"])}
    core = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = template(core)
    student = student_with(core, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    counts = count_tokens(student, [["abba abba", "ab"]])
    assert {core.id_to_token(number): int(counts[number]) for number in np.flatnonzero(counts)} == {
        "[CLS]": 2,
        "[SEP]": 2,
        "abba": 2,
        "ab": 1,
    }
    kept = choose_tokens(student, counts, 3)
    assert [core.id_to_token(number) for number in kept.old_ids] == [*SPECIAL, "a", "##a", "b", "##b", "abba"]
    assert (kept.seen, kept.obligatory) == (4, 7)
    cut = cut_vocabulary(student, kept)
    tokens = [cut.tokenizer.convert_ids_to_tokens(ids) for ids in token_ids(cut.tokenizer, ["abba", "abbaba", "ab c"])]
    assert tokens[0] == ["[CLS]", "abba", "[SEP]"]
    assert tokens[1] == ["[CLS]", "abba", "##b", "##a", "[SEP]"]  # "##ba" is dropped
    assert tokens[2] == ["[CLS]", "a", "##b", "[UNK]", "[SEP]"]


def test_bpe_keeps_all_that_a_token_is_merged_from() -> None:
    names = ["<pad>", "a", "b", "c", "d", "ab", "bc", "abc", "cd", "abcd"]
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc"), ("c", "d"), ("abc", "d")]
    core = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    student = student_with(core, pad="<pad>")
    kept = choose_tokens(student, count_tokens(student, [["abc"]]))
    # Both ways to "abc" are kept, "cd" and "abcd" are not.
    assert [core.id_to_token(number) for number in kept.old_ids] == ["<pad>", "a", "b", "c", "d", "ab", "bc", "abc"]
    cut = content_of(cut_vocabulary(student, kept))["model"]
    assert [tuple(merge) for merge in cut["merges"]] == [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")]


def test_unigram_keeps_the_penalty_of_unknown_characters() -> None:
    pieces = [("[PAD]", 0.0), ("ab", -3.0), ("[UNK]", 0.0), ("a", -2.0), ("b", -2.5), ("rare", -20.0), ("abb", -4.0)]
    core = Tokenizer(models.Unigram(pieces, unk_id=2))
    student = student_with(core, unk_token="[UNK]")
    kept = choose_tokens(student, count_tokens(student, [["abb"]]))
    # An unknown character costs 10 more than "rare".
    assert [core.id_to_token(number) for number in kept.old_ids] == ["[PAD]", "[UNK]", "a", "b", "rare", "abb"]
    cut = content_of(cut_vocabulary(student, kept))
    assert cut["model"]["unk_id"] == 1
    assert cut["model"]["vocab"][2] == ["a", -2.0]


def test_bytes_are_kept_where_they_replace_unknown_characters() -> None:
    pieces = [("[UNK]", 0.0), ("<0x41>", -9.0), ("<0x42>", -9.0), ("▁the", -1.0), ("▁cat", -2.0)]
    core = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    student = student_with(core, pad="[UNK]", unk_token="[UNK]")
    kept = choose_tokens(student, count_tokens(student, [["the"]]))
    assert [core.id_to_token(number) for number in kept.old_ids] == ["[UNK]", "<0x41>", "<0x42>", "▁the"]


def test_ids_are_rewritten_everywhere() -> None:
    student = STUDENTS["bpe"]
    tokenizer: Any = student.tokenizer
    core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    core.add_special_tokens(["<extra>"])
    core.post_processor = processors.Sequence(
        [
            processors.ByteLevel(),
            processors.TemplateProcessing(
                single="<s> $A <extra>", special_tokens=[("<s>", 0), ("<extra>", core.token_to_id("<extra>"))]
            ),
        ]
    )
    changed = student_with(core, roberta=True, pad="<pad>", bos_token="<s>", eos_token="</s>", sep_token="<extra>")
    kept = choose_tokens(changed, count_tokens(changed, [["the cat"]]))
    cut = cut_vocabulary(changed, kept)
    content, last = content_of(cut), len(kept.old_ids) - 1
    assert content["added_tokens"][-1]["id"] == cut.tokenizer.convert_tokens_to_ids("<extra>") == last
    assert content["post_processor"]["processors"][1]["special_tokens"]["<extra>"]["ids"] == [last]
    padded = content_of(changed) | {"padding": {"pad_id": core.token_to_id("<extra>"), "pad_token": "<extra>"}}
    assert cut_content(padded, kept.new_ids(len(changed.tokenizer)))["padding"] == {
        "pad_id": last,
        "pad_token": "<extra>",
    }
    assert token_ids(cut.tokenizer, ["the cat"])[0][-1] == last


def test_positions_counted_from_the_padding_id_do_not_move() -> None:
    # "zz" comes before the padding token: RoBERTa would count positions from 0 if it were dropped.
    core = Tokenizer(models.WordLevel({"zz": 0, "<pad>": 1, "[UNK]": 2, "a": 3, "b": 4, "c": 5}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    student = student_with(core, roberta=True, pad="<pad>", unk_token="[UNK]")
    kept = choose_tokens(student, count_tokens(student, [["a c a"]]))
    assert kept.old_ids.tolist() == [0, 1, 2, 3, 5]
    cut = cut_vocabulary(student, kept)
    assert np.allclose(cut.encode(["a c", "c"]), student.encode(["a c", "c"]), atol=1e-6)
    bert = student_with(core, pad="<pad>", unk_token="[UNK]")
    assert choose_tokens(bert, count_tokens(bert, [["a c a"]])).old_ids.tolist() == [1, 2, 3, 5]


def test_new_ids_are_the_inverse_of_old_ids() -> None:
    kept = KeptTokens(np.array([4, 1, 5]), seen=3, obligatory=0)
    assert kept.new_ids(7).tolist() == [-1, 1, -1, -1, 0, 2, -1]


def test_a_tokenizer_without_a_tokenizer_json_is_refused() -> None:
    student = STUDENTS["bpe"]
    other: Any = type("Slow", (), {"padding_side": "right"})()
    slow = Student(student.encoder, other, pooling="mean", max_length=8, name="slow-model")
    with pytest.raises(StudentError, match=r"slow-model cannot be cut: Slow has no tokenizer\.json"):
        count_tokens(slow, [["a"]])
