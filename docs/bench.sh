#!/usr/bin/env bash
# Seconds of commit 82e5ae4 and of this one, in pairs on one machine: `docs/bench.sh sampler1 5`. What to time: sampler1
# and sampler2 (128 problems x 16 completions by tiny/worded, with one thread or two, without loading), run (`make run`
# with that model, the default of 82e5ae4) or test (`make test`), after both commands have set up .venv here. Nothing else
# should run on the machine.
# Prints each pair and then the median ratio; results/benchmarks/pairs.txt has what it printed.
set -euo pipefail
what=$1 pairs=$2
cd "$(dirname "$0")/.."
now=$PWD before=$(mktemp -d)
trap 'rm -rf "$before"' EXIT
git clone --quiet "$now" "$before/topr"
git -C "$before/topr" checkout --quiet 82e5ae4
touch -d 2020-01-01 "$before"/topr/requirements*.txt # which are the same: make need not install anything
ln -s "$now/.venv" "$before/topr/.venv"

sampler='
import functools, time
from pipeline import sampling
from pipeline.models.language_model import load_model
from train_gsm8k import Settings, gsm8k_task
settings = Settings(model="tiny/worded")
task, lm = gsm8k_task(settings), load_model(settings.model)
problems, drawn = task.train[:128], sampling.SamplingParameters(max_new_tokens=settings.max_new_tokens)
if hasattr(sampling, "prompts_of"):
    prompts = sampling.prompts_of(task, problems, lm, settings.max_new_tokens)
    engine = functools.partial(sampling.transformers_engine, lm, 40_000)
else:
    prompts, engine = [task.prompt(one) for one in problems], sampling.transformers_engine(lm, 40_000)
begun = time.monotonic()
assert len(list(engine(prompts, 16, drawn, 0))) == 2_048
print(time.monotonic() - begun)'

seconds() { # of the command in the folder $1
  local begun
  cd "$1"
  case $what in
    sampler*) OMP_NUM_THREADS=${what#sampler} OMP_WAIT_POLICY=passive .venv/bin/python -c "$sampler" ;;
    *)
      begun=$(date +%s.%N)
      make "$what" ARGS="$([ "$what" = test ] || echo "--model tiny/worded --out $(mktemp -d -p "$before")/run")" > "$before/log" 2>&1 ||
        { tail -20 "$before/log" >&2; exit 1; }
      date +%s.%N | awk -v begun="$begun" "{ print \$1 - begun }" ;;
  esac
}

echo "# docs/bench.sh $what $pairs: 82e5ae4 and $(git describe --always --dirty), seconds and ratio; $(uname -m), $(nproc) cores"
for pair in $(seq "$pairs"); do
  if [ $((pair % 2)) = 1 ]; then first=$(seconds "$before/topr"); second=$(seconds "$now")
  else second=$(seconds "$now"); first=$(seconds "$before/topr"); fi
  echo "$first $second" | awk '{ printf "%.1f %.1f %.3f\n", $1, $2, $2 / $1 }' | tee -a "$before/ratios"
done
sort -k3 -g "$before/ratios" | awk '{ ratio[NR] = $3 } END { print "median ratio", ratio[int((NR + 1) / 2)] }'
