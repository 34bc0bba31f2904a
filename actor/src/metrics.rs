//! An actor's metrics for operators, in the text format of OpenMetrics (`--metrics-listen`). Names,
//! units and meanings stand in docs/reliability.md; a test holds the two together.

use std::sync::{Arc, atomic::Ordering};

use prometheus_client::{
    encoding::text::encode,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};

/// What the content is, for an HTTP answer.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Counters = Family<[(&'static str, &'static str); 1], Counter>;

/// All metrics of an actor. Cheap to clone; nothing here blocks.
#[derive(Clone, Debug)]
pub struct Metrics(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    registry: Registry,
    connected: Gauge,
    connections: Counter,
    leases: Gauge,
    episodes: Counters,
    spooled: Gauge,
    spool: Gauge,
    adapters: Counter,
    fetched: Counters,
    relayed: Counters,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut inner = Inner {
            registry: Registry::with_prefix("rollcall_actor"),
            connected: Gauge::default(),
            connections: Counter::default(),
            leases: Gauge::default(),
            episodes: Family::default(),
            spooled: Gauge::default(),
            spool: Gauge::default(),
            adapters: Counter::default(),
            fetched: Family::default(),
            relayed: Family::default(),
        };
        let it = &mut inner.registry;
        it.register("connected", "1 while a learner has let it in", inner.connected.clone());
        it.register("connections", "Links to the learner", inner.connections.clone());
        it.register("leases", "Leases in hand", inner.leases.clone());
        it.register("episodes", "What became of leases and episodes", inner.episodes.clone());
        it.register("spool_episodes", "Episodes not acknowledged", inner.spooled.clone());
        let bytes = Unit::Bytes;
        it.register_with_unit("spool", "Their length", bytes.clone(), inner.spool.clone());
        it.register("adapters", "Adapters that arrived whole", inner.adapters.clone());
        it.register_with_unit("fetched", "Adapter chunks", bytes.clone(), inner.fetched.clone());
        let among = "Adapter chunks between actors";
        it.register_with_unit("relay", among, bytes, inner.relayed.clone());
        Self(Arc::new(inner))
    }
}

fn gauge(number: usize) -> i64 {
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

    /// A learner let it in.
    pub fn connected(&self) {
        self.0.connections.inc();
        self.0.connected.set(1);
    }

    /// The link ended.
    pub fn disconnected(&self) {
        self.0.connected.set(0);
    }

    /// So many leases are in hand, and so many episodes and bytes wait to be acknowledged.
    pub fn holds(&self, leases: usize, spooled: usize, spool_bytes: u64) {
        self.0.leases.set(gauge(leases));
        self.0.spooled.set(gauge(spooled));
        self.0.spool.set(i64::try_from(spool_bytes).unwrap_or(i64::MAX));
    }

    /// A lease or an episode ended: `played`, `failed`, `stored`, `duplicate`, `rejected`.
    pub fn episode(&self, outcome: &'static str) {
        self.0.episodes.get_or_create(&[("outcome", outcome)]).inc();
    }

    /// So many bytes of adapters came from other actors until now, and went to them.
    pub fn relayed(&self, taken: u64, served: u64) {
        for (direction, total) in [("taken", taken), ("served", served)] {
            let counter = self.0.relayed.get_or_create(&[("direction", direction)]);
            counter.inner().store(total, Ordering::Relaxed);
        }
    }

    /// An adapter arrived, in so many bytes of deltas and of whole chunks.
    pub fn adapter(&self, delta: u64, whole: u64) {
        self.0.adapters.inc();
        self.0.fetched.get_or_create(&[("form", "delta")]).inc_by(delta);
        self.0.fetched.get_or_create(&[("form", "whole")]).inc_by(whole);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_metric_stands_in_the_documentation_and_nothing_else_does() {
        let metrics = Metrics::default();
        metrics.connected();
        metrics.holds(3, 2, 1000);
        metrics.episode("stored");
        metrics.adapter(10, 20);
        metrics.relayed(30, 40);
        let text = metrics.render();
        for line in [
            "rollcall_actor_connected 1",
            "rollcall_actor_leases 3",
            "rollcall_actor_spool_bytes 1000",
            "rollcall_actor_episodes_total{outcome=\"stored\"} 1",
            "rollcall_actor_fetched_bytes_total{form=\"delta\"} 10",
            "rollcall_actor_relay_bytes_total{direction=\"served\"} 40",
        ] {
            assert!(text.lines().any(|it| it == line), "{line} is not in\n{text}");
        }
        let docs = include_str!("../../docs/reliability.md");
        let documented: BTreeSet<&str> = docs
            .lines()
            .filter_map(|line| line.strip_prefix("| `rollcall_actor_"))
            .filter_map(|line| line.split('`').next())
            .collect();
        let types: BTreeSet<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE rollcall_actor_"))
            .filter_map(|line| line.split(' ').next())
            .collect();
        assert_eq!(documented, types);
    }
}
