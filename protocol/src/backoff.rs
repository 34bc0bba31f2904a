//! When to try again: exponential back-off with jitter, so that a fleet of actors does not return
//! to a restarted learner in one instant. No clock and no randomness of its own.

use std::time::Duration;

/// Waits between attempts to reconnect.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    cap: Duration,
    failures: u32,
}

impl Default for Backoff {
    /// From 200 ms to 10 s.
    fn default() -> Self {
        Self::new(Duration::from_millis(200), Duration::from_secs(10))
    }
}

impl Backoff {
    /// Doubles from `first` up to `cap`.
    pub fn new(first: Duration, cap: Duration) -> Self {
        Self { first, cap, failures: 0 }
    }

    /// How long to wait after one more failure, given a uniform draw from [0, 1): between half and
    /// the whole of the doubled wait.
    pub fn failed(&mut self, uniform: f64) -> Duration {
        let doubled = self.first.saturating_mul(2_u32.saturating_pow(self.failures)).min(self.cap);
        self.failures = self.failures.saturating_add(1);
        doubled.mul_f64(0.5 + 0.5 * uniform.clamp(0.0, 1.0))
    }

    /// A connection held: the next failure waits briefly again.
    pub fn succeeded(&mut self) {
        self.failures = 0;
    }

    /// Failures since the last success.
    pub fn failures(&self) -> u32 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_cap_and_start_over_after_success() {
        let mut backoff = Backoff::default();
        let waits: Vec<u128> = (0..8).map(|_| backoff.failed(1.0).as_millis()).collect();
        assert_eq!(waits, [200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
        for _ in 0..100 {
            assert!(backoff.failed(0.999) <= Duration::from_secs(10));
        }
        backoff.succeeded();
        assert_eq!(backoff.failed(0.0), Duration::from_millis(100));
    }
}
