//! Episodes without a neural network: a small byte-level tokenizer, a chat template like Qwen's, and
//! a player that says prepared texts through the same format, recorder and rules as a real one.

// Every test program uses its own part of this.
#![allow(dead_code)]

use std::{fs, path::Path, sync::Arc};

use environments::{EnvironmentSpec, Recorder, ToolSpec, text::CUT_MARK};
use learner::{
    audit::{AuditTerms, Audited, Auditor, Presented, Rejected},
    leases::Standing,
    reward::RewardProtocol,
};
use policy::{
    chat::{ChatFormat, ChatOptions, Dialect, ObservationBound},
    episode_script::{EpisodeLimits, EpisodeScript},
    vision::{PromptImages, episode_prompt},
};
use protocol::{
    Digest, Episode, EpisodeId, FinishReason, Image, Lease, LeaseId, NoiseKey, OnMalformed,
    PolicyDigest, RunId, Sampling, Span, Split, StreamHasher, Task, TraceChain,
};
use serde_json::{Value, json};

/// Added tokens, with ids after the 256 bytes.
const CONTROL: [&str; 7] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
];

/// Ids of the model that there is none of.
pub(crate) const VOCABULARY: u32 = 263;

/// More of them, where there are images.
const IMAGE_CONTROL: [&str; 3] = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"];

/// Ids of a model that is shown images.
pub(crate) const IMAGE_VOCABULARY: u32 = 266;

/// The id that stands for an image.
pub(crate) const IMAGE_PAD: u32 = 265;

const TEMPLATE: &str = r"{%- if tools %}{{- '<|im_start|>system\nTools:' }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}";

/// The byte that each byte-level character stands for, as GPT-2 lays them out.
fn byte_characters() -> Vec<char> {
    let printable =
        |b: u32| (33..=126).contains(&b) || (161..=172).contains(&b) || (174..=255).contains(&b);
    let mut spare = 256;
    (0..256)
        .map(|byte| {
            let code = if printable(byte) {
                byte
            } else {
                spare += 1;
                spare - 1
            };
            char::from_u32(code).expect("a character")
        })
        .collect()
}

pub(crate) fn write_tokenizer(dir: &Path) {
    write_files(dir, &CONTROL);
}

/// The same for a checkpoint that is shown images: a block of 32 x 32 pixels takes an id.
pub(crate) fn write_image_tokenizer(dir: &Path) {
    write_files(dir, &[&CONTROL[..], &IMAGE_CONTROL].concat());
    let processor = json!({
        "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16,
        "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5], "size": {"shortest_edge": 1024, "longest_edge": 1_048_576},
    });
    fs::write(dir.join("preprocessor_config.json"), processor.to_string()).expect("written");
    let config = json!({"image_token_id": IMAGE_PAD});
    fs::write(dir.join("config.json"), config.to_string()).expect("written");
}

fn write_files(dir: &Path, control: &[&str]) {
    let vocabulary: serde_json::Map<String, Value> = byte_characters()
        .into_iter()
        .enumerate()
        .map(|(id, c)| (c.to_string(), json!(id)))
        .collect();
    let added: Vec<Value> = (256..)
        .zip(control)
        .map(|(id, content)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false,
                   "rstrip": false, "normalized": false, "special": content.starts_with("<|")})
        })
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                  "ignore_merges": false, "vocab": vocabulary, "merges": []},
    });
    let config = json!({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"});
    fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).expect("written");
    fs::write(dir.join("tokenizer_config.json"), config.to_string()).expect("written");
    fs::write(dir.join("chat_template.jinja"), TEMPLATE).expect("written");
}

/// One sampled turn, prepared.
#[derive(Clone, Debug)]
pub(crate) enum Say {
    /// This text and the stop id.
    Text(String),
    /// A guess.
    Guess(i64),
    /// This text, cut where the budget ends; it must be long enough.
    Cut(String),
}

pub(crate) fn text(text: &str) -> Say {
    Say::Text(text.into())
}

/// A run to play and audit episodes of.
pub(crate) struct World {
    pub(crate) run: RunId,
    pub(crate) environment: EnvironmentSpec,
    pub(crate) format: Arc<ChatFormat>,
    pub(crate) limits: EpisodeLimits,
    pub(crate) auditor: Auditor,
}

pub(crate) fn policy() -> PolicyDigest {
    PolicyDigest(Digest::of(b"policy"))
}

impl World {
    pub(crate) fn new(environment: Value) -> Self {
        let limits = EpisodeLimits {
            max_tool_rounds: 3,
            max_completion: 2000,
            on_malformed: OnMalformed::Observe,
        };
        Self::with(environment, limits, RewardProtocol::Environment)
    }

    pub(crate) fn with(environment: Value, limits: EpisodeLimits, reward: RewardProtocol) -> Self {
        let environment = EnvironmentSpec::parse(&environment).expect("an environment");
        let dir = tempfile::tempdir().expect("a directory");
        let shows_images = environment.describe().expect("opens").images;
        let vocabulary = if shows_images {
            write_image_tokenizer(dir.path());
            IMAGE_VOCABULARY
        } else {
            write_tokenizer(dir.path());
            VOCABULARY
        };
        let tools = environment.tools().expect("opens").iter().map(ToolSpec::to_json).collect();
        let bound = environment.limits().observation_tokens;
        let bound = bound.map(|tokens| ObservationBound { tokens, mark: CUT_MARK });
        let options = ChatOptions { tools, bound, ..ChatOptions::default() };
        let format = Arc::new(ChatFormat::load(dir.path(), options).expect("a format"));
        let images =
            shows_images.then(|| PromptImages::load(dir.path(), &format).expect("a processor"));
        Self::of(AuditTerms {
            run: RunId(Digest::of(b"run")),
            format,
            images,
            vocabulary,
            environment,
            limits,
            reward: reward.into(),
            max_staleness: 0,
            allow_recorded: false,
        })
    }

    pub(crate) fn of(terms: AuditTerms) -> Self {
        Self {
            run: terms.run,
            environment: terms.environment.clone(),
            format: terms.format.clone(),
            limits: terms.limits,
            auditor: Auditor::new(terms).expect("opens"),
        }
    }

    /// A lease of the guessing game.
    pub(crate) fn lease(&self, group: u64, generation: u32, seed: u64) -> Lease {
        let task = Task {
            id: "task-1".into(),
            prompt: "Let us play. ".into(),
            fields: r#"{"split":"train"}"#.into(),
            split: Split::Train,
        };
        self.lease_of(task, LeaseId { group, generation }, seed)
    }

    pub(crate) fn lease_of(&self, task: Task, id: LeaseId, seed: u64) -> Lease {
        Lease {
            run: self.run,
            id,
            attempt: 0,
            task,
            seed,
            noise_key: NoiseKey::derive(&self.run, id),
            policy: policy(),
            sampling: Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 },
            deadline_ms: 1000,
        }
    }

    fn say(&self, say: &Say, budget: u32) -> (Vec<u32>, FinishReason) {
        let written = match say {
            Say::Text(text) | Say::Cut(text) => text.clone(),
            Say::Guess(value) if self.format.dialect() == Dialect::FunctionTags => format!(
                "<tool_call>\n<function=guess>\n<parameter=value>\n{value}\n</parameter>\n\
                 </function>\n</tool_call>"
            ),
            Say::Guess(value) => call("guess", json!({"value": value})),
        };
        let mut ids = self.format.turn(&written).expect("encodes");
        let budget = usize::try_from(budget).expect("small");
        if matches!(say, Say::Cut(_)) {
            assert!(ids.len() > budget, "{} ids do not fill {budget}", ids.len());
            ids.truncate(budget);
            return (ids, FinishReason::Length);
        }
        assert!(ids.len() <= budget, "{} ids are over {budget}", ids.len());
        (ids, FinishReason::Stop)
    }

    /// The ids of an episode's start.
    pub(crate) fn prompt(&self, lease: &Lease, reset_text: &str, shown: &[&Image]) -> Vec<u32> {
        let images = self.auditor.terms().images.as_ref();
        episode_prompt(&self.format, images, &lease.task.prompt, reset_text, shown)
            .expect("renders")
    }

    /// Plays the prepared turns until the episode ends; all of them must be used.
    pub(crate) fn play(&self, lease: &Lease, turns: &[Say]) -> Episode {
        let opened = self.environment.open().expect("opens");
        let mut recorder =
            Recorder::reset(opened, lease, self.environment.limits()).expect("resets");
        let shown: Vec<&Image> = recorder.images().iter().collect();
        let mut tokens = self.prompt(lease, recorder.reset_text(), &shown);
        let mut loss_mask = vec![0; tokens.len()];
        let mut spans = Vec::new();
        let mut script = EpisodeScript::new(self.limits);
        for (turn, say) in (0..).zip(turns) {
            let (ids, finish) = self.say(say, script.budget());
            let mut context = StreamHasher::default();
            context.feed(&tokens);
            let span = Span {
                offset: u32::try_from(tokens.len()).expect("short"),
                logp_raw: vec![-0.5; ids.len()],
                logp_sampling: vec![-0.25; ids.len()],
                finish,
                policy: lease.policy,
                context: context.digest(),
                ids,
            };
            tokens.extend_from_slice(&span.ids);
            loss_mask.resize(tokens.len(), 1);
            let parsed = self.format.parse(&span.ids, finish);
            let suffix = |shown: &[&str]| self.format.suffix(finish, shown).expect("renders");
            let framing = if parsed.calls.is_empty() {
                0
            } else {
                suffix(&vec![""; parsed.calls.len()]).len()
            };
            let plan = script.turn(finish, span.ids.len(), &parsed.calls, framing);
            spans.push(span);
            let mut shown = Vec::new();
            for (call, permit) in parsed.calls.iter().zip(&plan.permits) {
                shown.push(
                    recorder.call(turn, call, *permit).expect("no fault").observation.clone(),
                );
            }
            let shown: Vec<&str> = shown.iter().map(String::as_str).collect();
            if plan.answers() {
                recorder.answer(turn, &parsed.content).expect("no fault");
            }
            let mut end = plan.end;
            if end.is_none() {
                let external = suffix(&shown);
                end = script.observe(recorder.done(), external.len());
                if end.is_none() {
                    tokens.extend_from_slice(&external);
                    loss_mask.resize(tokens.len(), 0);
                }
            }
            if let Some(end) = end {
                assert_eq!(
                    spans.len(),
                    turns.len(),
                    "the episode ended ({end}) before its last turn"
                );
                let recording = recorder.finish().expect("no fault");
                return Episode {
                    run: lease.run,
                    lease: lease.id,
                    task: lease.task.id.clone(),
                    seed: lease.seed,
                    policy: lease.policy,
                    reset_text: recording.reset_text,
                    reset_images: recording.reset_images,
                    tokens,
                    loss_mask,
                    spans,
                    trace: recording.rows,
                    trace_head: recording.head,
                    end,
                    reward: recording.score.reward,
                    images: recording.images,
                };
            }
        }
        panic!("the episode did not end after {} turns", turns.len());
    }

    /// Guesses by bisection: wins 7 of 8 games.
    pub(crate) fn bisection(&self, lease: &Lease) -> Vec<Say> {
        let target = (1..=8)
            .find(|value| {
                let mut probe = Recorder::reset(
                    self.environment.open().expect("opens"),
                    lease,
                    self.environment.limits(),
                )
                .expect("resets");
                let arguments = json!({"value": value}).to_string();
                let call = protocol::ParsedCall::Call { name: "guess".into(), arguments };
                probe.call(0, &call, protocol::CallPermit::Run).expect("no fault").observation
                    == "correct"
            })
            .expect("a hidden number");
        let (mut low, mut high, mut turns) = (1, 8, Vec::new());
        while turns.len() < 3 {
            let guess = (low + high) / 2;
            turns.push(Say::Guess(guess));
            match guess.cmp(&target) {
                std::cmp::Ordering::Equal => break,
                std::cmp::Ordering::Less => low = guess + 1,
                std::cmp::Ordering::Greater => high = guess - 1,
            }
        }
        turns
    }

    /// Audits an episode that must pass.
    #[track_caller]
    pub(crate) fn accept(&self, episode: &Episode, lease: &Lease) -> Audited {
        self.audit(episode, lease).unwrap_or_else(|rejected| panic!("refused: {}", rejected.reason))
    }

    pub(crate) fn audit(&self, episode: &Episode, lease: &Lease) -> Result<Audited, Box<Rejected>> {
        let body = episode.encode().expect("encodes");
        self.audit_bytes(
            EpisodeId::of_body(&body),
            &body,
            &Standing::Open(Box::new(lease.clone())),
            0,
        )
    }

    pub(crate) fn audit_bytes(
        &self,
        id: EpisodeId,
        body: &[u8],
        standing: &Standing,
        behind: u64,
    ) -> Result<Audited, Box<Rejected>> {
        self.auditor.audit(Presented { id, body, standing, behind })
    }
}

/// A tool call as the policy writes it.
pub(crate) fn call(tool: &str, arguments: Value) -> String {
    let call = json!({"name": tool, "arguments": arguments});
    format!("<tool_call>\n{call}\n</tool_call>")
}

/// Hashes the trace anew, as a forger would.
pub(crate) fn rechain(episode: &mut Episode) {
    let Episode { run, lease, task, seed, reset_text, reset_images, trace, .. } = episode;
    let mut chain = TraceChain::start(run, *lease, task, *seed, reset_text, reset_images);
    for row in trace {
        row.chain = chain.push(row);
    }
    episode.trace_head = chain.head();
}

/// Rebuilds offsets, contexts and mask from the ids of the spans and the external ids between them.
pub(crate) fn restream(episode: &mut Episode, prompt: &[u32], externals: &[Vec<u32>]) {
    let mut tokens = prompt.to_vec();
    let mut mask = vec![0; prompt.len()];
    for (index, span) in episode.spans.iter_mut().enumerate() {
        let mut context = StreamHasher::default();
        context.feed(&tokens);
        span.context = context.digest();
        span.offset = u32::try_from(tokens.len()).expect("short");
        tokens.extend_from_slice(&span.ids);
        mask.resize(tokens.len(), 1);
        tokens.extend_from_slice(externals.get(index).map_or(&[], Vec::as_slice));
        mask.resize(tokens.len(), 0);
    }
    episode.tokens = tokens;
    episode.loss_mask = mask;
}
