//! What `--help` shows at its end. A test reads these command lines as the program would.

pub(super) const LEARNER: &str = "\
Examples:
  learner init agent --model Qwen3-0.6B
  learner plan recipe.json
  learner train recipe.json --local-actors 1
  learner audit runs/agent";
pub(super) const INIT: &str = "\
Examples:
  learner init agent
  learner init sft sft.json --model Qwen3-0.6B --dataset train.jsonl --valid eval.jsonl
  learner init ppo ppo.json --model Qwen3.5-9B --adapter runs/vision/adapter";
pub(super) const PLAN: &str = "\
Examples:
  learner plan recipe.json
  learner plan recipe.json --explain
  learner plan ppo.json --rows round-2/train.jsonl --adapter runs/ppo/adapter";
pub(super) const TRAIN: &str = "\
Examples:
  learner train recipe.json --local-actors 1
  learner train recipe.json --local-actors 1 --resume
  learner train recipe.json --listen 0.0.0.0:7171 --host learner.example --identity identity
  learner train recipe.json --nproc-per-node 2 --local-actors 2 --actor-devices cuda:2,cuda:3";
pub(super) const SFT: &str = "\
Examples:
  learner sft recipe.json
  learner sft recipe.json --output runs/second --device cuda:0
  learner sft recipe.json --nproc-per-node 8 --resume";
pub(super) const PPO: &str = "\
Examples:
  learner ppo ppo.json --adapter runs/vision/adapter --reference runs/vision/adapter
  learner ppo ppo.json --rows round-2/train.jsonl --adapter runs/ppo/adapter --output runs/ppo-2
  learner ppo ppo.json --nproc-per-node 8 --resume";
pub(super) const EVAL: &str = "\
Examples:
  learner eval recipe.json
  learner eval recipe.json --adapter runs/agent/adapters/64-0123456789ab --json";
pub(super) const CALIBRATE: &str = "\
Examples:
  learner calibrate recipe.json --output calibration.json
  learner calibrate recipe.json --output calibration.json --device cuda:0 --actor-devices cpu";
pub(super) const AUDIT: &str = "\
Examples:
  learner audit runs/agent
  learner audit runs/agent --model Qwen3-0.6B --sampling 64
  learner audit runs/agent --json";
pub(super) const REPORT: &str = "\
Examples:
  learner report runs/agent
  learner report runs/agent --compare runs/second --output both.html
  learner report runs/agent --format svg --output plots";
pub(super) const WATCH: &str = "\
Examples:
  learner watch runs/agent
  learner watch runs/agent --json";
pub(super) const SCORE: &str = "\
Examples:
  learner score --model Qwen3-0.6B --data rows.jsonl
  learner score --model Qwen3-0.6B --adapter runs/sft/adapter --data rows.jsonl --device cpu";
pub(super) const DATASET: &str = "\
Examples:
  learner dataset guess --rows 512 --split train --output train.jsonl
  learner dataset '{\"name\": \"office\", \"level\": 2}' --rows 64 --split eval --output eval.jsonl
  learner dataset frames --rows 2000 --split train --expert --output rows.jsonl";
pub(super) const TOKEN: &str = "\
Examples:
  learner token show identity
  learner token rotate identity";
pub(super) const DIGEST: &str = "\
Examples:
  learner digest Qwen3-0.6B
  learner digest train.jsonl";
pub(super) const COMPLETIONS: &str = "\
Examples:
  learner completions bash > ~/.local/share/bash-completion/completions/learner
  learner completions zsh > ~/.zfunc/_learner
  learner completions fish > ~/.config/fish/completions/learner.fish";
pub(super) const MAN: &str = "\
Examples:
  learner man ~/.local/share/man/man1";
