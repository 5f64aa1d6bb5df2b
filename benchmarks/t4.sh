#!/usr/bin/env bash
# The cost of every method on a GPU, as the TALAS paper tells it of a T4: BERT-base, a teacher of Qwen3-Embedding-4B's
# sizes, both with random weights, batches of 32, half precision, 15 GB. It needs no network and takes five minutes.
#
#   benchmarks/t4.sh [FOLDER]        writes FOLDER/t4.json and FOLDER/t4.md; FOLDER is . unless named
#   QUICK=1 benchmarks/t4.sh         a student of 3 layers and a small teacher on whatever is there, in a minute or two
#
# STUDENT, TEACHER, PRECISION, LENGTHS, BATCH, CAP (empty: none), MINUTES, STEPS and ROUNDS may be set; DISTILL is the
# command itself. The figures go into a report with `distill report --bench FOLDER/t4.json`.
set -euo pipefail

folder=${1:-.}
mkdir -p "$folder"
if [[ -n ${QUICK:-} ]]; then
    : "${STUDENT:=shape:minilm-l3-h384}" "${TEACHER:=shape:minilm-l6-h384}" "${PRECISION:=auto}" "${CAP=}"
    : "${BATCH:=8}" "${LENGTHS:=16}" "${STEPS:=1}" "${WARM_UP:=1}" "${ROUNDS:=1}"
fi
: "${STUDENT:=shape:bert-base}" "${TEACHER:=Qwen3-Embedding-4B}" "${PRECISION:=fp16}" "${CAP=15GB}"
: "${BATCH:=32}" "${LENGTHS:=64}" "${STEPS:=8}" "${WARM_UP:=4}" "${ROUNDS:=3}" "${MINUTES:=3.5}"

methods=talas,talas+asam,talas+norm-one-view,jasper,distillcse,leaf,emo,dskd,cdm,emo@online,dskd@online,cdm@online
cap=()
if [[ -n $CAP ]]; then
    cap=(--memory-cap "$CAP")
fi

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "${DISTILL:-distill}" bench --student "$STUDENT" --random-weights "$TEACHER" --methods "${METHODS:-$methods}" \
    --precision "$PRECISION" --batch-size "$BATCH" --lengths "$LENGTHS" "${cap[@]}" --steps "$STEPS" \
    --warm-up "$WARM_UP" --rounds "$ROUNDS" --minutes "$MINUTES" -o "$folder/t4.json" -o "$folder/t4.md"
