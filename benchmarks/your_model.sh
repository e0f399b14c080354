#!/usr/bin/env bash
# Models people train, not ours: GPT-2, a Llama of 1.2B parameters, adapters on it, ViT-B/16. bf16, AdamW. About eight
# minutes on an H200. Results go to OUT (first argument), one folder a part; the table of every part comes last.
# METHODS, STEPS, WARMUP, INSTRUMENTS and PARTS (names of parts) can be set from outside. A part that fails does not stop the rest.

OUT="${1:-${OUT:-dpscope-results/your-model}}"
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PYTHON="${PYTHON:-$([ -x "$HERE/../.venv/bin/python" ] && echo "$HERE/../.venv/bin/python" || echo python3)}"
METHODS="${METHODS:-standard,flat,ghost,flash}"
WARMUP="${WARMUP:-2}"
STEPS="${STEPS:-5}"
INSTRUMENTS="${INSTRUMENTS:-time,memory}"
PARTS="${PARTS:-gpt2 llama llama-lora vit}"

part() {  # NAME OPTIONS…
  local name="$1"
  shift
  case " $PARTS " in *" $name "*) ;; *) return ;; esac
  echo "== $name"
  "$PYTHON" -m dpscope compare "$@" --methods "$METHODS" --instruments "$INSTRUMENTS" --dtype bf16 --optimizer adamw --warmup "$WARMUP" \
    --steps "$STEPS" --timeout 240 --out "$OUT/$name" --resume | grep '^\['
}

mkdir -p "$OUT"
part gpt2 --model hf:gpt2 --batch-size 16 --seq-len 1024
part llama --model hf:llama --batch-size 4 --seq-len 2048
part llama-lora --model hf:llama --lora r=16,alpha=32,target=q_proj,k_proj,v_proj,o_proj --batch-size 8 --seq-len 2048
part vit --model hf:vit --batch-size 64
# Opacus's ghost clipping refuses the tied embedding of GPT-2; this one has a head of its own. Asked for by name.
part gpt2-untied --hf-config "$HERE/gpt2-untied.json" --batch-size 16 --seq-len 1024

for name in $PARTS; do
  echo
  echo "== $name"
  sed -n '/^Model /,/^× is/p' "$OUT/$name/summary.txt" | sed '/^× is/d'
done
