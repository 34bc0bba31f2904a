//! An episode that takes longer than its recipe allows is void, whether a tool keeps it or the sampler: it
//! is given up at the actor, its lease fails, and other episodes go on.

use std::{
    collections::BTreeSet,
    sync::{Arc, Condvar, Mutex},
};

use actor::player::{Outcome, Player};
use environments::{
    Blueprint, Description, Determinism, Environment, EnvironmentSpec, Fault, Limits, Reply, Score,
    SpecError, ToolSpec,
};
use learner::curriculum::TaskOrder;
use policy::engine::{Engine, EngineConfig};
use protocol::{LeaseId, Task};
use serde_json::{Map, Value};
use tests::{rollouts::Stage, workspace};

/// A tool that answers only when it is told to.
#[derive(Clone, Debug, Default)]
struct Stuck(Arc<(Mutex<bool>, Condvar)>, Vec<ToolSpec>);

impl Stuck {
    fn release(&self) {
        *self.0.0.lock().expect("nobody panicked") = true;
        self.0.1.notify_all();
    }
}

impl Blueprint for Stuck {
    fn name(&self) -> &str {
        "stuck"
    }
    fn version(&self) -> String {
        "stuck-1".into()
    }
    fn settings(&self) -> Map<String, Value> {
        Map::new()
    }
    fn check_task(&self, _: &Task) -> Result<(), SpecError> {
        Ok(())
    }
    fn open(&self) -> Result<Box<dyn Environment>, Fault> {
        let description = Description {
            name: "stuck".into(),
            version: "stuck-1".into(),
            tools: self.1.clone(),
            milestones: Vec::new(),
            reward_range: 0.0..=1.0,
            determinism: Determinism::Recorded,
            images: false,
            answers: false,
        };
        Ok(Box::new(Game(self.clone(), description)))
    }
    fn score(&self, _: &BTreeSet<&str>) -> Option<Score> {
        None
    }
    fn waits(&self) -> bool {
        true
    }
}

struct Game(Stuck, Description);

impl Environment for Game {
    fn describe(&self) -> &Description {
        &self.1
    }
    fn reset(&mut self, task: &Task, _: u64) -> Result<Option<String>, Fault> {
        // One of them has a reset that never ends.
        if task.id == "stuck" {
            self.call("", &Map::new())?;
        }
        Ok(Some("The number is between 1 and 8. You have 3 guesses.".into()))
    }
    fn call(&mut self, _: &str, _: &Map<String, Value>) -> Result<Reply, Fault> {
        let told = self.0.0.0.lock().expect("nobody panicked");
        drop(self.0.0.1.wait_while(told, |told| !*told).expect("nobody panicked"));
        Ok(Reply { result: Ok("higher".into()), reached: Vec::new(), done: true })
    }
    fn score(&mut self) -> Result<Score, Fault> {
        Ok(Score { reward: 0.0, success: false, milestones: Default::default() })
    }
}

#[test]
fn an_episode_over_its_time_is_void_and_the_player_goes_on() {
    let stage = Stage::open(&workspace().join("examples/guess/recipe.json"), None, None);
    let tools = stage.plan.recipe.environment.tools().expect("opens");
    let stuck = Stuck(Arc::default(), tools);
    let played = |seconds: u64, leases: [&str; 2], release: bool| -> Vec<Outcome> {
        let limits = Limits { episode_seconds: Some(seconds), ..Limits::default() };
        let environment = EnvironmentSpec::custom(Arc::new(stuck.clone()), limits);
        let mut engine =
            Engine::new(stage.decoder.clone(), EngineConfig::default()).expect("an engine");
        engine.add_adapter(stage.policy(), None).expect("fits");
        let limits = stage.plan.recipe.training.episode_limits();
        let mut player = Player::new(engine, stage.plan.format.clone(), environment, limits);
        let mut order = TaskOrder::new(stage.plan.run, &stage.plan.train);
        for (generation, id) in (0..).zip(leases) {
            let mut lease = stage.lease(&mut order, LeaseId { group: 0, generation });
            lease.task.id = id.into();
            player.start(lease).expect("starts");
        }
        if release {
            stuck.release();
        }
        let mut outcomes = Vec::new();
        while player.in_flight() > 0 {
            outcomes.extend(player.step().expect("steps"));
        }
        assert_eq!(player.leases().count(), 0);
        outcomes
    };
    let outcomes = played(1, ["stuck", "calls"], false);
    assert_eq!(outcomes.len(), 2);
    for outcome in outcomes {
        let Outcome::Failed { reason, .. } = outcome else { panic!("it counts: {outcome:?}") };
        assert!(
            reason.starts_with(
                "the episode took longer than environment.limits.episode_seconds, 1 s"
            ),
            "{reason}"
        );
    }
    // In time, the same episodes are played.
    let outcomes = played(86_400, ["stuck", "calls"], true);
    assert!(outcomes.iter().all(|it| matches!(it, Outcome::Played { .. })), "{outcomes:?}");
}
