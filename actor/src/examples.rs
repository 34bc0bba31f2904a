//! What `--help` shows at its end. A test reads these command lines as the program would.

pub(crate) const ACTOR: &str = "\
Examples:
  actor check guess
  actor sample --model Qwen3-0.6B --prompt 'Hello'
  actor join 'learner.example:7171#…' --model Qwen3-0.6B";
pub(crate) const JOIN: &str = "\
Examples:
  actor join 'learner.example:7171#…' --model Qwen3-0.6B
  ROLLCALL_JOIN='learner.example:7171#…' actor join --model Qwen3-0.6B --device cuda:1 --slots 64
  actor join --join-file /run/secrets/rollcall-join --model Qwen3-0.6B --spool spool
  actor join --join-file join --model Qwen3-0.6B --relay 0.0.0.0:7272";
pub(crate) const SAMPLE: &str = "\
Examples:
  actor sample --model Qwen3-0.6B --prompt 'Hello'
  actor sample --model Qwen3-0.6B --adapter runs/sft/adapter --prompts prompts.jsonl --json";
pub(crate) const CHECK: &str = "\
Examples:
  actor check wordle
  actor check '{\"name\": \"guess\", \"n\": 8}'
  actor check recipe.json --task '{\"n\": 9}'";
pub(crate) const COMPLETIONS: &str = "\
Examples:
  actor completions bash > ~/.local/share/bash-completion/completions/actor
  actor completions zsh > ~/.zfunc/_actor";
pub(crate) const MAN: &str = "\
Examples:
  actor man ~/.local/share/man/man1";
