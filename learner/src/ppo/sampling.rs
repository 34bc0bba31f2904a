//! Codes from the policy itself: sampled for a round, or greedy to measure it.

use std::collections::HashMap;

use policy::{
    engine::{Engine, EngineConfig, Generated},
    model::{Adapter, Decoder},
};
use protocol::{Digest, LeaseId, NoiseKey, PolicyDigest, RunId, Sampling};
use serde::{Deserialize, Serialize};
use terminal::Failure;

use crate::{
    ranks::{Ranks, split_even},
    rows::{Accuracy, Example, Images, RowFormat, Tally},
};

/// Streams that are sampled at a time.
const AT_A_TIME: usize = 64;

/// One code of the policy: its ids as text where all are digits, else nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampledCode {
    /// The digits, of the wanted number.
    pub code: Option<String>,
    /// Sum of the ids' log-probabilities at temperature 1, nats.
    pub logp: f64,
}

/// How codes are sampled.
#[derive(Clone, Copy, Debug)]
pub struct SamplingPlan {
    /// Codes a row.
    pub generations: u32,
    /// 0 is greedy.
    pub temperature: f64,
    /// Keys the noise, with `round`, the row and the code.
    pub run: RunId,
    /// The round, from 0.
    pub round: u64,
    /// The first row's number in the round, where others sample for those before it.
    pub first: u64,
}

/// Samples codes under one adapter after another.
pub struct CodeSampler<'a> {
    engine: Engine,
    format: &'a RowFormat,
    digits: usize,
    policy: Option<PolicyDigest>,
}

impl<'a> CodeSampler<'a> {
    /// A sampler of codes of so many digits, for prompts of at most `longest` ids.
    ///
    /// # Errors
    /// Weights that cannot be read back from their device.
    pub fn new(
        decoder: &Decoder,
        format: &'a RowFormat,
        digits: usize,
        longest: usize,
    ) -> Result<Self, Failure> {
        // Streams end on whole blocks of the cache; prompts are kept besides.
        let places = (longest + digits + 64).saturating_mul(AT_A_TIME * 2);
        let config =
            EngineConfig { max_batch: AT_A_TIME, max_tokens: places, ..EngineConfig::default() };
        let engine = Engine::new(decoder.clone(), config).map_err(Failure::fault)?;
        Ok(Self { engine, format, digits, policy: None })
    }

    /// Samples under `adapter` from now on.
    ///
    /// # Errors
    /// An adapter that does not fit.
    pub fn set_policy(&mut self, adapter: &Adapter) -> Result<(), Failure> {
        let bytes = adapter.to_safetensors().map_err(Failure::fault)?;
        let policy = PolicyDigest(Digest::of(&bytes));
        if self.policy == Some(policy) {
            return Ok(());
        }
        if let Some(old) = self.policy.take() {
            self.engine.drop_adapter(&old).map_err(Failure::fault)?;
        }
        self.engine.add_adapter(policy, adapter.clone()).map_err(Failure::fault)?;
        self.policy = Some(policy);
        Ok(())
    }

    /// Codes for each of `examples`, whose own codes are not shown.
    ///
    /// # Errors
    /// No policy is set, an image that changed, or a failing device.
    pub fn sample(
        &mut self,
        examples: &[&Example],
        images: &Images,
        plan: &SamplingPlan,
    ) -> Result<Vec<Vec<SampledCode>>, Failure> {
        let policy =
            self.policy.ok_or_else(|| Failure::Fault("no policy to sample from".into()))?;
        let mut all = Vec::with_capacity(examples.len());
        let tasks = (AT_A_TIME / plan.generations.max(1) as usize).max(1);
        for (chunk, examples) in examples.chunks(tasks).enumerate() {
            let first = plan.first + (chunk * tasks) as u64;
            all.append(&mut self.sample_some(policy, examples, images, first, plan)?);
        }
        Ok(all)
    }

    fn sample_some(
        &mut self,
        policy: PolicyDigest,
        examples: &[&Example],
        images: &Images,
        first: u64,
        plan: &SamplingPlan,
    ) -> Result<Vec<Vec<SampledCode>>, Failure> {
        #[allow(clippy::cast_possible_truncation, reason = "sampled at this f32 temperature")]
        let temperature = plan.temperature as f32;
        let sampling = Sampling { temperature, top_k: 0, top_p: 1.0, min_p: 0.0 };
        let stops = [self.format.turn_end()];
        let budget = u32::try_from(self.digits).unwrap_or(u32::MAX);
        let mut open = Vec::new();
        for (at, example) in examples.iter().enumerate() {
            let shown = example.placed(images).map_err(Failure::Fault)?;
            for generation in 0..plan.generations {
                // Rounds are as far apart as no file has rows.
                let group = (plan.round << 40) + first + at as u64;
                let key = NoiseKey::derive(&plan.run, LeaseId { group, generation });
                let sequence = self.engine.open(policy, key, sampling).map_err(Failure::fault)?;
                self.engine
                    .append_images(sequence, example.prompt(), shown.clone())
                    .and_then(|()| self.engine.generate(sequence, budget, &stops))
                    .map_err(Failure::fault)?;
                open.push(sequence);
            }
        }
        let mut done: HashMap<_, Generated> = HashMap::new();
        while self.engine.has_work() {
            let generated = self.engine.step().map_err(Failure::fault)?;
            done.extend(generated.into_iter().map(|it| (it.sequence, it)));
        }
        let mut codes = Vec::with_capacity(open.len());
        for sequence in open {
            self.engine.close(sequence);
            let generated = done
                .remove(&sequence)
                .ok_or_else(|| Failure::Fault("a code was not finished".into()))?;
            codes.push(self.code(&generated));
        }
        Ok(codes.chunks(plan.generations.max(1) as usize).map(<[_]>::to_vec).collect())
    }

    fn code(&self, generated: &Generated) -> SampledCode {
        let code = self.format.code(&generated.ids).filter(|code| code.len() == self.digits);
        let logp = generated.logp_raw.iter().map(|logp| f64::from(*logp)).sum();
        SampledCode { code, logp }
    }

    /// Accuracy of greedy codes against the examples' own.
    ///
    /// # Errors
    /// As [`CodeSampler::sample`].
    pub fn greedy_accuracy(
        &mut self,
        examples: &[Example],
        images: &Images,
        codes: &[&str],
        ranks: &mut Ranks,
    ) -> Result<Accuracy, Failure> {
        let run = RunId(Digest::of(b"greedy choices draw no noise"));
        let plan = SamplingPlan { generations: 1, temperature: 0.0, run, round: 0, first: 0 };
        let mine = split_even(examples.len(), ranks.rank(), ranks.world());
        let examples: Vec<&Example> = examples[mine.clone()].iter().collect();
        let mut tally = Tally::default();
        for (codes, right) in self.sample(&examples, images, &plan)?.iter().zip(&codes[mine]) {
            let found = codes.first().and_then(|it| it.code.as_deref()).unwrap_or_default();
            tally.add(right_digits(found, right));
        }
        tally.sum(ranks)?;
        Ok(tally.accuracy())
    }
}

/// Which digits of `right` stand in their place in `found`.
pub fn right_digits(found: &str, right: &str) -> impl Iterator<Item = bool> {
    right.bytes().enumerate().map(|(at, digit)| found.as_bytes().get(at) == Some(&digit))
}
