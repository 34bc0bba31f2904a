//! The learner's metrics for operators, in the text format of OpenMetrics (`--metrics-listen`). Names,
//! units and meanings stand in docs/reliability.md; a test holds the two together. Beside them it has the
//! numbers of the last lines of `metrics.jsonl`, under their names (docs/metrics.md).

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    time::Duration,
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _, text::encode},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::{ConstGauge, Gauge},
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};

use serde_json::Value;

use crate::{leases::LeaseCounts, scalars::scalars};

/// What the content is, for an HTTP answer.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Labels = [(&'static str, &'static str); 1];
type Counters = Family<Labels, Counter>;
type Gauges = Family<Labels, Gauge>;

/// Numbers of `metrics.jsonl` that have metrics of their own here.
const OTHERWISE: [&str; 6] =
    ["actors", "episodes_by_actor/", "leases/", "rejections/", "staleness", "tokens"];

/// The last of each number of `metrics.jsonl`.
#[derive(Debug, Default)]
struct Latest(Mutex<BTreeMap<String, f64>>);

impl Collector for Latest {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let help = "The last number of this name in metrics.jsonl";
        for (name, number) in &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            let gauge = ConstGauge::new(*number);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        Ok(())
    }
}

/// All metrics of a learner. Cheap to clone; nothing here blocks.
#[derive(Clone, Debug)]
pub struct Metrics(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    registry: Registry,
    steps: Gauge,
    actors: Gauge,
    joins: Counters,
    leases: Counters,
    episodes: Counters,
    rejections: Counters,
    tokens: Counters,
    latest: Arc<Latest>,
    staleness: Histogram,
    sync: Histogram,
    queues: Gauges,
    journal: Gauge,
    broadcast: Counters,
    adapter: Gauges,
    relayed: Gauge,
    relay_failures: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("rollcall");
        let inner = Inner {
            steps: Gauge::default(),
            actors: Gauge::default(),
            joins: Family::default(),
            leases: Family::default(),
            episodes: Family::default(),
            rejections: Family::default(),
            tokens: Family::default(),
            latest: Arc::default(),
            staleness: Histogram::new([0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]),
            sync: Histogram::new(exponential_buckets(0.000_25, 2.0, 15)),
            queues: Family::default(),
            journal: Gauge::default(),
            broadcast: Family::default(),
            adapter: Family::default(),
            relayed: Gauge::default(),
            relay_failures: Counter::default(),
            registry: Registry::default(),
        };
        registry.register("steps", "Optimizer steps made", inner.steps.clone());
        registry.register("actors", "Actors connected now", inner.actors.clone());
        registry.register("joins", "Peers that joined or were turned away", inner.joins.clone());
        registry.register("leases", "Leases granted and how grants ended", inner.leases.clone());
        registry.register("episodes", "What became of episodes", inner.episodes.clone());
        registry.register(
            "audit_rejections",
            "Episodes that the audit refused, by its first failing rung",
            inner.rejections.clone(),
        );
        registry.register("tokens", "Ids sampled and ids trained on", inner.tokens.clone());
        registry.register_collector(Box::new(inner.latest.clone()));
        registry.register(
            "staleness_steps",
            "Optimizer steps between the policy of an episode and the update that used it",
            inner.staleness.clone(),
        );
        let (seconds, bytes) = (Unit::Seconds, Unit::Bytes);
        registry.register_with_unit(
            "journal_sync",
            "Time until appended records were on stable storage",
            seconds,
            inner.sync.clone(),
        );
        registry.register("queue_depth", "What waits in a queue", inner.queues.clone());
        registry.register_with_unit(
            "journal",
            "Length of the journal",
            bytes.clone(),
            inner.journal.clone(),
        );
        registry.register_with_unit(
            "broadcast",
            "Adapter chunks that actors took",
            bytes.clone(),
            inner.broadcast.clone(),
        );
        registry.register_with_unit(
            "adapter",
            "What an actor fetches of the newest adapter",
            bytes,
            inner.adapter.clone(),
        );
        registry.register(
            "relayed_actors",
            "Actors that fetch adapters from other actors",
            inner.relayed.clone(),
        );
        registry.register(
            "relay_failures",
            "Times that an actor said so of the one it fetched from",
            inner.relay_failures.clone(),
        );
        Self(Arc::new(Inner { registry, ..inner }))
    }
}

fn total(family: &Counters, label: &'static str, value: &'static str, total: u64) {
    family.get_or_create(&[(label, value)]).inner().store(total, Ordering::Relaxed);
}

fn gauge(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

impl Metrics {
    /// The exposition.
    pub fn render(&self) -> String {
        let mut text = String::new();
        // Writing to a text cannot fail.
        let _ = encode(&mut text, &self.0.registry);
        text
    }

    /// So many actors are connected.
    pub fn actors(&self, connected: usize) {
        self.0.actors.set(gauge(connected as u64));
    }

    /// A peer came: `joined`, or the name of why it was turned away.
    pub fn join(&self, outcome: &'static str) {
        self.0.joins.get_or_create(&[("outcome", outcome)]).inc();
    }

    /// What became of leases and episodes since the start of the run.
    pub fn leases(&self, counts: &LeaseCounts, unreadable: u64) {
        let leases = [
            ("granted", counts.granted),
            ("submitted", counts.submitted),
            ("failed", counts.failed),
            ("expired", counts.expired),
        ];
        for (outcome, count) in leases {
            total(&self.0.leases, "outcome", outcome, count);
        }
        let episodes = [
            ("received", counts.received),
            ("accepted", counts.accepted),
            ("rejected", counts.rejected),
            ("duplicate", counts.duplicates),
            ("late", counts.late),
            ("equivocation", counts.equivocations),
            ("unreadable", unreadable),
        ];
        for (outcome, count) in episodes {
            total(&self.0.episodes, "outcome", outcome, count);
        }
    }

    /// The audit refused an episode.
    pub fn rejected(&self, rung: &'static str) {
        self.0.rejections.get_or_create(&[("rung", rung)]).inc();
    }

    /// An optimizer step was made: ids sampled and ids trained on.
    pub fn step(&self, step: u64, sampled: u64, trained: u64) {
        self.0.steps.set(gauge(step));
        for (kind, count) in [("sampled", sampled), ("trained", trained)] {
            self.0.tokens.get_or_create(&[("kind", kind)]).inc_by(count);
        }
    }

    /// A line was written to `metrics.jsonl`.
    pub fn scalars(&self, record: &Value) {
        let mut latest = self.0.latest.0.lock().unwrap_or_else(PoisonError::into_inner);
        let own = |name: &str| {
            OTHERWISE.iter().any(|it| name == *it || (it.ends_with('/') && name.starts_with(it)))
        };
        for (name, number) in scalars(record).into_iter().filter(|(name, _)| !own(name)) {
            latest.insert(name.replace('/', "_"), number);
        }
    }

    /// An episode was used so many steps after its policy was made.
    pub fn staleness(&self, steps: u64) {
        self.0.staleness.observe(steps as f64);
    }

    /// The journal was brought to stable storage.
    pub fn synced(&self, took: Duration) {
        self.0.sync.observe(took.as_secs_f64());
    }

    /// So much waits.
    pub fn queue(&self, queue: &'static str, depth: usize) {
        self.0.queues.get_or_create(&[("queue", queue)]).set(gauge(depth as u64));
    }

    /// How long the journal is.
    pub fn journal(&self, bytes: u64) {
        self.0.journal.set(gauge(bytes));
    }

    /// Adapter bytes that actors took since the start, as deltas and as whole chunks.
    pub fn broadcast(&self, delta: u64, whole: u64) {
        total(&self.0.broadcast, "form", "delta", delta);
        total(&self.0.broadcast, "form", "whole", whole);
    }

    /// So many actors fetch adapters from others now, and so many reports of failing ones came until now.
    pub fn relays(&self, relayed: usize, failures: u64) {
        self.0.relayed.set(gauge(relayed as u64));
        self.0.relay_failures.inner().store(failures, Ordering::Relaxed);
    }

    /// What the newest adapter takes, as deltas and as whole chunks.
    pub fn adapter(&self, delta: u64, whole: u64) {
        for (form, bytes) in [("delta", delta), ("whole", whole)] {
            self.0.adapter.get_or_create(&[("form", form)]).set(gauge(bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// One number of an exposition.
    #[derive(Clone, Debug, PartialEq)]
    struct Sample {
        name: String,
        labels: String,
        value: f64,
    }

    /// Reads an exposition as a scraper does.
    fn parse(text: &str) -> Result<Vec<Sample>, String> {
        let mut samples = Vec::new();
        let mut ended = false;
        for (at, line) in (1..).zip(text.lines()) {
            let wrong = format!("line {at}: {line:?}");
            if ended {
                return Err(wrong);
            }
            if let Some(comment) = line.strip_prefix("# ") {
                ended = comment == "EOF";
                let known = ["HELP ", "TYPE ", "UNIT "].iter().any(|it| comment.starts_with(it));
                if !ended && !known {
                    return Err(wrong);
                }
                continue;
            }
            let (series, value) = line.rsplit_once(' ').ok_or_else(|| wrong.clone())?;
            let (name, labels) = match series.split_once('{') {
                None => (series, ""),
                Some((name, rest)) => (name, rest.strip_suffix('}').ok_or_else(|| wrong.clone())?),
            };
            let letters = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
            let value = value.parse().map_err(|_| wrong.clone())?;
            if name.is_empty() || !name.chars().all(letters) {
                return Err(wrong);
            }
            samples.push(Sample { name: name.to_owned(), labels: labels.to_owned(), value });
        }
        if ended { Ok(samples) } else { Err("no # EOF".to_owned()) }
    }

    fn used() -> Metrics {
        let metrics = Metrics::default();
        metrics.actors(3);
        metrics.join("joined");
        metrics.join("proof");
        let counts = LeaseCounts { granted: 9, accepted: 4, ..LeaseCounts::default() };
        metrics.leases(&counts, 2);
        metrics.rejected("tokens");
        metrics.step(5, 100, 80);
        metrics.scalars(&serde_json::json!({
            "step": 5, "rollout_tokens_per_second": 1234.5, "clip_ratio/low_mean": 0.25,
            "leases": {"granted": 9}, "staleness": 2, "tokens": 80,
        }));
        metrics.staleness(2);
        metrics.synced(Duration::from_millis(3));
        metrics.queue("events", 7);
        metrics.journal(1 << 20);
        metrics.broadcast(10, 20);
        metrics.adapter(1, 2);
        metrics
    }

    #[test]
    fn the_exposition_parses_and_says_what_was_told() {
        let samples = parse(&used().render()).expect("an exposition");
        let value = |name: &str, labels: &str| {
            let found = samples.iter().find(|it| it.name == name && it.labels == labels);
            found.unwrap_or_else(|| panic!("{name} {labels}")).value
        };
        assert_eq!(value("rollcall_actors", ""), 3.0);
        assert_eq!(value("rollcall_steps", ""), 5.0);
        assert_eq!(value("rollcall_joins_total", "outcome=\"proof\""), 1.0);
        assert_eq!(value("rollcall_leases_total", "outcome=\"granted\""), 9.0);
        assert_eq!(value("rollcall_episodes_total", "outcome=\"unreadable\""), 2.0);
        assert_eq!(value("rollcall_audit_rejections_total", "rung=\"tokens\""), 1.0);
        assert_eq!(value("rollcall_rollout_tokens_per_second", ""), 1234.5);
        assert_eq!(value("rollcall_clip_ratio_low_mean", ""), 0.25);
        for own in ["rollcall_staleness", "rollcall_leases_granted", "rollcall_tokens"] {
            assert!(!samples.iter().any(|it| it.name == own), "{own} has a metric of its own");
        }
        assert_eq!(value("rollcall_journal_sync_seconds_count", ""), 1.0);
        assert_eq!(value("rollcall_staleness_steps_sum", ""), 2.0);
        assert_eq!(value("rollcall_broadcast_bytes_total", "form=\"whole\""), 20.0);
        assert_eq!(value("rollcall_journal_bytes", ""), f64::from(1 << 20));
        for wrong in ["a 1", "# EOF\na 1", "x y\n# EOF", "{} 1\n# EOF", "a{b 1\n# EOF", "#EOF"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_metric_stands_in_the_documentation_and_nothing_else_does() {
        let docs = include_str!("../../docs/reliability.md");
        let documented: BTreeSet<&str> = docs
            .lines()
            .filter_map(|line| line.strip_prefix("| `rollcall_"))
            .filter_map(|line| line.split('`').next())
            .filter(|name| !name.starts_with("actor_"))
            .collect();
        let text = used().render();
        let types: BTreeSet<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE rollcall_"))
            .filter_map(|line| line.split(' ').next())
            .filter(|name| !["rollout_tokens_per_second", "clip_ratio_low_mean"].contains(name))
            .collect();
        assert_eq!(documented, types);
    }
}
