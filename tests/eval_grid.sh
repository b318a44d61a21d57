#!/usr/bin/env bash
# Policies × tasks × lengths on one GPU, into one file of results that a second call goes on with.
#
#     tests/eval_grid.sh grid.jsonl book.txt --profile embedded
#
# A process for each policy: much of the time of one is its host's. The last call runs nothing more;
# it writes the table to grid.txt, everything to grid.json and the heat maps to grid.html.
# LENGTHS, ITEMS, HAYSTACKS, TASKS, POLICIES and PYTHON may be set in the environment.
set -euo pipefail

results=$1 book=$2
shift 2
read -r -a policies <<<"${POLICIES:-tokenselect full infllm streaming_llm snapkv}"
grid=(
    --tasks "${TASKS:-niah_single_2,niah_multikey_1,niah_multikey_3,kv_retrieval,vt}"
    --lengths "${LENGTHS:-8k,32k,128k}"
    --items "${ITEMS:-50}"
    --haystacks "${HAYSTACKS:-5}"
    --haystack document,noise
    --source "$book"
    --out "$results"
    "$@"
)
evaluate() { "${PYTHON:-python}" -m tsdoc eval "${grid[@]}" "$@"; }

all=() processes=()
for policy in "${policies[@]}"; do
    all+=(--policy "$policy")
    evaluate --policy "$policy" --quiet >/dev/null &
    processes+=($!)
done
failed=0
for process in "${processes[@]}"; do wait "$process" || failed=1; done
evaluate "${all[@]}" --quiet --html "${results%.jsonl}.html" | tee "${results%.jsonl}.txt"
evaluate "${all[@]}" --quiet --json >"${results%.jsonl}.json"
exit "$failed"
