//! How often each address failed to join lately, so that guessing secrets and noise stay cheap here.
//!
//! Each address has a bucket that a failure fills by one and time empties; a full one shuts the
//! address out before a handshake. Only failures that prove the address count, so nobody shuts another
//! one out from afar. An IPv6 network of 64 bits is one address: its owner has all of them.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    time::Duration,
};

use tokio::time::Instant;

/// Addresses that are remembered.
const MAX_ADDRESSES: usize = 4096;

/// Failures of an address, minus what is forgiven.
#[derive(Clone, Copy)]
struct Bucket {
    level: f64,
    at: Instant,
}

/// The buckets.
pub(super) struct Failures {
    allowed: u32,
    forgiven: Duration,
    buckets: HashMap<IpAddr, Bucket>,
}

impl Failures {
    /// `allowed` failures at once, and one more each time that `forgiven` has passed.
    pub(super) fn new(allowed: u32, forgiven: Duration) -> Self {
        Self { allowed, forgiven, buckets: HashMap::new() }
    }

    fn level(&self, bucket: &Bucket, now: Instant) -> f64 {
        let passed = now.saturating_duration_since(bucket.at).as_secs_f64();
        (bucket.level - passed / self.forgiven.as_secs_f64().max(1e-9)).max(0.0)
    }

    /// Whether an address failed too often.
    pub(super) fn shut_out(&self, address: IpAddr, now: Instant) -> bool {
        let bucket = self.buckets.get(&network(address));
        bucket.is_some_and(|bucket| self.level(bucket, now) > f64::from(self.allowed) - 1.0)
    }

    /// One more failure.
    pub(super) fn failed(&mut self, address: IpAddr, now: Instant) {
        let address = network(address);
        if !self.buckets.contains_key(&address) && self.buckets.len() >= MAX_ADDRESSES {
            self.make_room(now);
        }
        let level = self.buckets.get(&address).map_or(0.0, |bucket| self.level(bucket, now));
        let level = (level + 1.0).min(f64::from(self.allowed));
        self.buckets.insert(address, Bucket { level, at: now });
    }

    /// Forgets who is forgiven, or else the quarter that failed least.
    fn make_room(&mut self, now: Instant) {
        let mut levels: Vec<(f64, IpAddr)> =
            self.buckets.iter().map(|(it, bucket)| (self.level(bucket, now), *it)).collect();
        levels.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (at, (level, address)) in levels.into_iter().enumerate() {
            if level <= 0.0 || at < MAX_ADDRESSES / 4 {
                self.buckets.remove(&address);
            }
        }
    }
}

fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(v6) => match v6.to_ipv4_mapped() {
            Some(v4) => v4.into(),
            None => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(number: u32) -> IpAddr {
        IpAddr::V4(number.into())
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_is_shut_out_for_as_long_as_it_fails_and_others_are_not() {
        let mut failures = Failures::new(3, Duration::from_secs(6));
        for _ in 0..2 {
            failures.failed(v4(1), Instant::now());
            assert!(!failures.shut_out(v4(1), Instant::now()));
        }
        for _ in 0..50 {
            failures.failed(v4(1), Instant::now());
            assert!(failures.shut_out(v4(1), Instant::now()));
        }
        assert!(!failures.shut_out(v4(2), Instant::now()));
        tokio::time::advance(Duration::from_secs(7)).await;
        assert!(!failures.shut_out(v4(1), Instant::now()), "one more attempt after a while");
        failures.failed(v4(1), Instant::now());
        assert!(failures.shut_out(v4(1), Instant::now()));
    }

    #[tokio::test(start_paused = true)]
    async fn the_table_is_bounded_and_keeps_the_worst() {
        let mut failures = Failures::new(20, Duration::from_secs(6));
        for _ in 0..20 {
            failures.failed(v4(7), Instant::now());
        }
        for number in 1000..60_000 {
            failures.failed(v4(number), Instant::now());
            assert!(failures.buckets.len() <= MAX_ADDRESSES);
        }
        assert!(failures.shut_out(v4(7), Instant::now()));
    }

    #[test]
    fn an_ipv6_network_is_one_address() {
        let parse = |text: &str| network(text.parse().expect("an address"));
        assert_eq!(parse("2001:db8:1:2::5"), parse("2001:db8:1:2:ffff::9"));
        assert_ne!(parse("2001:db8:1:2::5"), parse("2001:db8:1:3::5"));
        assert_eq!(parse("::ffff:10.0.0.1"), parse("10.0.0.1"));
    }
}
