//! Episodes on the wire: the one message whose bytes outlive the connection.
//!
//! The body is what is spooled, hashed, journalled and audited, so it names its own format and its
//! id is the digest of the bytes as received, never of a re-encoding.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::{Checker, WireError, bounds::*, codes, decode_body, encode_body};
use crate::{
    CallKind, Digest, Episode, EpisodeEnd, EpisodeId, FinishReason, Image, LeaseId, PolicyDigest,
    RunId, Span, TraceRow, frame::Kind,
};

/// The format of an episode without images.
const PLAIN: u16 = 1;
/// The format of an episode with images: the plain one, and the images after it.
const WITH_IMAGES: u16 = 2;
const CHECK: Checker = Checker("episode");

codes!(FinishReason, finish_code, finish_from, { Stop = 0, Length = 1 });
codes!(EpisodeEnd, end_code, end_from, {
    Done = 0, NoCall = 1, Turns = 2, Length = 3, Malformed = 4,
});
codes!(CallKind, kind_code, kind_from, {
    Ok = 0, Raised = 1, BadArgs = 2, UnknownTool = 3, Malformed = 4, AfterDone = 5, OverLimit = 6,
    Answer = 7,
});

/// The front of every episode body. [`peek_lease`] reads it alone.
#[derive(Serialize, Deserialize)]
struct Head {
    format: u16,
    run: Digest,
    group: u64,
    generation: u32,
}

const HEAD_LEN: usize = 2 + 32 + 8 + 4;

#[derive(Serialize, Deserialize)]
struct EpisodeWire<'a> {
    head: Head,
    task: &'a str,
    seed: u64,
    policy: Digest,
    reset_text: &'a str,
    tokens: Cow<'a, [u32]>,
    loss_mask: &'a [u8],
    end: u8,
    reward: f64,
    trace_head: Digest,
    // Spans: one entry a span, ...
    span_offset: Vec<u32>,
    span_len: Vec<u32>,
    span_finish: Cow<'a, [u8]>,
    span_policy: Vec<Digest>,
    span_context: Vec<Digest>,
    // ... and one entry a sampled id, spans one after the other.
    ids: Vec<u32>,
    logp_raw: Vec<f32>,
    logp_sampling: Vec<f32>,
    // Trace rows: one entry a row, ...
    row_turn: Vec<u32>,
    row_call: Vec<u32>,
    row_kind: Cow<'a, [u8]>,
    row_done: Cow<'a, [u8]>,
    row_chain: Vec<Digest>,
    #[serde(borrow)]
    row_tool: Vec<&'a str>,
    #[serde(borrow)]
    row_arguments: Vec<&'a str>,
    #[serde(borrow)]
    row_observation: Vec<&'a str>,
    row_milestones: Vec<u32>,
    // ... and one entry a milestone, rows one after the other.
    #[serde(borrow)]
    milestones: Vec<&'a str>,
}

#[derive(Serialize, Deserialize)]
struct ImagesWire<'a> {
    /// Addresses of the images that the reset showed, in order.
    reset: Vec<Digest>,
    // One entry an image.
    width: Vec<u32>,
    height: Vec<u32>,
    #[serde(borrow)]
    pixels: Vec<&'a [u8]>,
}

#[derive(Serialize, Deserialize)]
struct WithImagesWire<'a> {
    #[serde(borrow)]
    episode: EpisodeWire<'a>,
    #[serde(borrow)]
    images: ImagesWire<'a>,
}

impl Episode {
    /// Encodes the body of an episode frame.
    ///
    /// # Errors
    /// The episode breaks a rule that [`Episode::decode`] would refuse it for.
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        self.validate()?;
        let episode = EpisodeWire::from(self);
        let body = if self.reset_images.is_empty() {
            encode_body("episode", &episode)?
        } else {
            let images = ImagesWire {
                reset: self.reset_images.clone(),
                width: self.images.iter().map(Image::width).collect(),
                height: self.images.iter().map(Image::height).collect(),
                pixels: self.images.iter().map(Image::pixels).collect(),
            };
            encode_body("episode", &WithImagesWire { episode, images })?
        };
        check_episode_len(body.len())?;
        Ok(body)
    }

    /// Decodes and validates a body. Untrusted bytes give an error, never a panic.
    ///
    /// # Errors
    /// The bytes are no episode, or one that breaks a rule of [`Episode::validate`].
    pub fn decode(body: &[u8]) -> Result<Self, WireError> {
        check_episode_len(body.len())?;
        let format: [u8; 2] = body.first_chunk().copied().unwrap_or_default();
        let episode = match u16::from_le_bytes(format) {
            WITH_IMAGES => {
                let wire: WithImagesWire<'_> = decode_body("episode", body)?;
                let (reset_images, images) = images(wire.images)?;
                Self { reset_images, images, ..Self::try_from(wire.episode)? }
            }
            // Whatever else it says is refused below, by name.
            _ => Self::try_from(decode_body::<EpisodeWire<'_>>("episode", body)?)?,
        };
        episode.validate()?;
        Ok(episode)
    }

    /// The shape rules of an episode: bounded counts and texts, a mask of 0 and 1 as long as the
    /// stream, spans that are non-empty, in bounds, in order and apart, columns of equal length,
    /// finite numbers, images within bounds. What the values mean, and whether the images are those that
    /// it says it showed, is the audit's business.
    ///
    /// # Errors
    /// The first rule that is broken, by field.
    pub fn validate(&self) -> Result<(), WireError> {
        CHECK.text("task", &self.task, MAX_NAME_BYTES)?;
        CHECK.ensure(!self.task.is_empty(), "task", || "an empty id".to_owned())?;
        CHECK.text("reset_text", &self.reset_text, MAX_OBSERVATION_BYTES)?;
        CHECK.count("tokens", self.tokens.len(), MAX_TOKENS)?;
        CHECK.column("loss_mask", self.loss_mask.len(), self.tokens.len())?;
        let odd = self.loss_mask.iter().position(|bit| *bit > 1);
        CHECK.ensure(odd.is_none(), "loss_mask", || {
            format!("position {} is neither 0 nor 1", odd.unwrap_or_default())
        })?;
        CHECK.ensure(self.reward.is_finite(), "reward", || {
            format!("{} is no reward", self.reward)
        })?;
        CHECK.count("spans", self.spans.len(), MAX_SPANS)?;
        let mut free = 0_usize;
        for (index, span) in self.spans.iter().enumerate() {
            free = validate_span(index, span, free, self.tokens.len())?;
        }
        CHECK.count("trace", self.trace.len(), MAX_ROWS)?;
        self.trace.iter().try_for_each(validate_row)?;
        self.validate_images()
    }

    fn validate_images(&self) -> Result<(), WireError> {
        CHECK.count("reset_images", self.reset_images.len(), MAX_IMAGES)?;
        CHECK.count("images", self.images.len(), MAX_IMAGES)?;
        CHECK.ensure(self.images.is_empty() || !self.reset_images.is_empty(), "images", || {
            "images that nothing shows".to_owned()
        })?;
        let bytes: usize = self.images.iter().map(|it| it.pixels().len()).sum();
        CHECK.ensure(bytes <= MAX_IMAGE_BYTES, "images", || {
            format!("{bytes} bytes of pixels, the limit is {MAX_IMAGE_BYTES}")
        })
    }
}

impl EpisodeId {
    /// The id of an encoded episode: the digest of its bytes.
    pub fn of_body(body: &[u8]) -> Self {
        Self(Digest::of(body))
    }
}

/// Whether an episode's body fits its frame.
pub(crate) fn check_episode_len(len: usize) -> Result<(), WireError> {
    let cap = Kind::Episode.cap();
    CHECK.ensure(len <= cap, "body", || format!("{len} bytes, the limit is {cap}"))
}

/// The run and lease that a body claims to answer, without decoding the rest. A hint for
/// accounting: nothing else of the body is checked.
pub fn peek_lease(body: &[u8]) -> Option<(RunId, LeaseId)> {
    let head: Head = decode_body("episode", body.get(..HEAD_LEN)?).ok()?;
    [PLAIN, WITH_IMAGES]
        .contains(&head.format)
        .then_some((RunId(head.run), LeaseId { group: head.group, generation: head.generation }))
}

/// Checks one span and returns where the next may start.
fn validate_span(
    index: usize,
    span: &Span,
    free: usize,
    tokens: usize,
) -> Result<usize, WireError> {
    let len = span.ids.len();
    CHECK.ensure(len > 0, "spans", || format!("span {index} is empty"))?;
    CHECK.column("spans.logp_raw", span.logp_raw.len(), len)?;
    CHECK.column("spans.logp_sampling", span.logp_sampling.len(), len)?;
    let start = usize::try_from(span.offset).unwrap_or(usize::MAX);
    CHECK.ensure(start >= free, "spans.offset", || {
        format!("span {index} starts at {start}, before the end of the one before it ({free})")
    })?;
    let end = start.saturating_add(len);
    CHECK.ensure(end <= tokens, "spans.offset", || {
        format!("span {index} ends at {end}, past the stream's {tokens} ids")
    })?;
    let finite = |values: &[f32]| values.iter().all(|value| value.is_finite());
    CHECK.ensure(finite(&span.logp_raw), "spans.logp_raw", || {
        format!("span {index} has a log-probability that is not finite")
    })?;
    CHECK.ensure(finite(&span.logp_sampling), "spans.logp_sampling", || {
        format!("span {index} has a log-probability that is not finite")
    })?;
    Ok(end)
}

fn validate_row(row: &TraceRow) -> Result<(), WireError> {
    CHECK.text("trace.tool", &row.tool, MAX_TOOL_BYTES)?;
    CHECK.text("trace.arguments", &row.arguments, MAX_ARGUMENTS_BYTES)?;
    CHECK.text("trace.observation", &row.observation, MAX_OBSERVATION_BYTES)?;
    CHECK.count("trace.milestones", row.milestones.len(), MAX_MILESTONES)?;
    row.milestones.iter().try_for_each(|name| CHECK.text("trace.milestones", name, MAX_NAME_BYTES))
}

impl<'a> From<&'a Episode> for EpisodeWire<'a> {
    /// Lengths fit `u32`: the episode was validated.
    fn from(episode: &'a Episode) -> Self {
        let spans = &episode.spans;
        let rows = &episode.trace;
        let count = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        Self {
            head: Head {
                format: if episode.reset_images.is_empty() { PLAIN } else { WITH_IMAGES },
                run: episode.run.0,
                group: episode.lease.group,
                generation: episode.lease.generation,
            },
            task: &episode.task,
            seed: episode.seed,
            policy: episode.policy.0,
            reset_text: &episode.reset_text,
            tokens: Cow::Borrowed(&episode.tokens),
            loss_mask: &episode.loss_mask,
            end: end_code(episode.end),
            reward: episode.reward,
            trace_head: episode.trace_head,
            span_offset: spans.iter().map(|s| s.offset).collect(),
            span_len: spans.iter().map(|s| count(s.ids.len())).collect(),
            span_finish: spans.iter().map(|s| finish_code(s.finish)).collect(),
            span_policy: spans.iter().map(|s| s.policy.0).collect(),
            span_context: spans.iter().map(|s| s.context).collect(),
            ids: spans.iter().flat_map(|s| s.ids.iter().copied()).collect(),
            logp_raw: spans.iter().flat_map(|s| s.logp_raw.iter().copied()).collect(),
            logp_sampling: spans.iter().flat_map(|s| s.logp_sampling.iter().copied()).collect(),
            row_turn: rows.iter().map(|r| r.turn).collect(),
            row_call: rows.iter().map(|r| r.call).collect(),
            row_kind: rows.iter().map(|r| kind_code(r.kind)).collect(),
            row_done: rows.iter().map(|r| u8::from(r.done)).collect(),
            row_chain: rows.iter().map(|r| r.chain).collect(),
            row_tool: rows.iter().map(|r| r.tool.as_str()).collect(),
            row_arguments: rows.iter().map(|r| r.arguments.as_str()).collect(),
            row_observation: rows.iter().map(|r| r.observation.as_str()).collect(),
            row_milestones: rows.iter().map(|r| count(r.milestones.len())).collect(),
            milestones: rows.iter().flat_map(|r| r.milestones.iter().map(String::as_str)).collect(),
        }
    }
}

impl TryFrom<EpisodeWire<'_>> for Episode {
    type Error = WireError;

    fn try_from(wire: EpisodeWire<'_>) -> Result<Self, WireError> {
        let format = wire.head.format;
        CHECK.ensure([PLAIN, WITH_IMAGES].contains(&format), "format", || {
            format!("{format}, this release reads {PLAIN} and {WITH_IMAGES}")
        })?;
        let spans = spans(&wire)?;
        let trace = rows(&wire)?;
        Ok(Self {
            run: RunId(wire.head.run),
            lease: LeaseId { group: wire.head.group, generation: wire.head.generation },
            task: wire.task.to_owned(),
            seed: wire.seed,
            policy: PolicyDigest(wire.policy),
            reset_text: wire.reset_text.to_owned(),
            reset_images: Vec::new(),
            tokens: wire.tokens.into_owned(),
            loss_mask: wire.loss_mask.to_vec(),
            spans,
            trace,
            trace_head: wire.trace_head,
            end: CHECK.code("end", wire.end, end_from(wire.end))?,
            reward: wire.reward,
            images: Vec::new(),
        })
    }
}

/// Addresses and images of an episode that has some.
fn images(wire: ImagesWire<'_>) -> Result<(Vec<Digest>, Vec<Image>), WireError> {
    CHECK.ensure(!wire.reset.is_empty(), "reset_images", || {
        format!("none; an episode without images has format {PLAIN}")
    })?;
    let count = wire.pixels.len();
    CHECK.count("images", count, MAX_IMAGES)?;
    CHECK.column("images.width", wire.width.len(), count)?;
    CHECK.column("images.height", wire.height.len(), count)?;
    let sides = wire.width.into_iter().zip(wire.height);
    let images = sides.zip(wire.pixels).map(|((width, height), pixels)| {
        Image::new(width, height, pixels.to_vec())
            .or_else(|error| CHECK.fail("images", error.to_string()))
    });
    Ok((wire.reset, images.collect::<Result<_, _>>()?))
}

fn spans(wire: &EpisodeWire<'_>) -> Result<Vec<Span>, WireError> {
    let count = wire.span_offset.len();
    CHECK.count("spans", count, MAX_SPANS)?;
    CHECK.column("spans.len", wire.span_len.len(), count)?;
    CHECK.column("spans.finish", wire.span_finish.len(), count)?;
    CHECK.column("spans.policy", wire.span_policy.len(), count)?;
    CHECK.column("spans.context", wire.span_context.len(), count)?;
    let total = wire.span_len.iter().map(|len| u64::from(*len)).sum::<u64>();
    CHECK.ensure(total == wire.ids.len() as u64, "spans.ids", || {
        format!("{} entries, the spans have {total}", wire.ids.len())
    })?;
    CHECK.column("spans.logp_raw", wire.logp_raw.len(), wire.ids.len())?;
    CHECK.column("spans.logp_sampling", wire.logp_sampling.len(), wire.ids.len())?;
    let mut spans = Vec::with_capacity(count);
    let mut at = 0_usize;
    for index in 0..count {
        // Column lengths and the total are equal, so every index and range exists.
        let end = at + usize::try_from(wire.span_len[index]).unwrap_or(usize::MAX);
        let finish = wire.span_finish[index];
        spans.push(Span {
            offset: wire.span_offset[index],
            ids: wire.ids[at..end].to_vec(),
            logp_raw: wire.logp_raw[at..end].to_vec(),
            logp_sampling: wire.logp_sampling[at..end].to_vec(),
            finish: CHECK.code("spans.finish", finish, finish_from(finish))?,
            policy: PolicyDigest(wire.span_policy[index]),
            context: wire.span_context[index],
        });
        at = end;
    }
    Ok(spans)
}

fn rows(wire: &EpisodeWire<'_>) -> Result<Vec<TraceRow>, WireError> {
    let count = wire.row_turn.len();
    CHECK.count("trace", count, MAX_ROWS)?;
    CHECK.column("trace.call", wire.row_call.len(), count)?;
    CHECK.column("trace.kind", wire.row_kind.len(), count)?;
    CHECK.column("trace.done", wire.row_done.len(), count)?;
    CHECK.column("trace.chain", wire.row_chain.len(), count)?;
    CHECK.column("trace.tool", wire.row_tool.len(), count)?;
    CHECK.column("trace.arguments", wire.row_arguments.len(), count)?;
    CHECK.column("trace.observation", wire.row_observation.len(), count)?;
    CHECK.column("trace.milestones", wire.row_milestones.len(), count)?;
    let total = wire.row_milestones.iter().map(|n| u64::from(*n)).sum::<u64>();
    CHECK.ensure(total == wire.milestones.len() as u64, "trace.milestones", || {
        format!("{} entries, the rows have {total}", wire.milestones.len())
    })?;
    let mut rows = Vec::with_capacity(count);
    let mut at = 0_usize;
    for index in 0..count {
        // Column lengths and the total are equal, so every index and range exists.
        let end = at + usize::try_from(wire.row_milestones[index]).unwrap_or(usize::MAX);
        let kind = wire.row_kind[index];
        rows.push(TraceRow {
            turn: wire.row_turn[index],
            call: wire.row_call[index],
            tool: wire.row_tool[index].to_owned(),
            arguments: wire.row_arguments[index].to_owned(),
            kind: CHECK.code("trace.kind", kind, kind_from(kind))?,
            milestones: wire.milestones[at..end].iter().map(|name| (*name).to_owned()).collect(),
            observation: wire.row_observation[index].to_owned(),
            done: CHECK.flag("trace.done", wire.row_done[index])?,
            chain: wire.row_chain[index],
        });
        at = end;
    }
    Ok(rows)
}
