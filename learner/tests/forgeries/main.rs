//! Every way to alter an episode is refused at a rung and with a name of its own.

mod images;
#[path = "../support/mod.rs"]
mod support;
mod table;

use learner::{
    audit::{Rejected, RungName},
    leases::Standing,
    reward::RewardProtocol,
};
use policy::episode_script::EpisodeLimits;
use protocol::{CallKind, Episode, EpisodeId, Image, Lease, LeaseId, OnMalformed};
use serde_json::{Value, json};
use support::{Say, World, call, rechain, text};
use table::{Base, FORGERIES, Forge, other, rebuild};

fn world() -> World {
    World::new(json!({"name": "guess"}))
}

/// Two wrong guesses and a turn without a call.
fn lost(world: &World) -> (Lease, Episode) {
    let lease = world.lease(7, 2, 11);
    let episode = world.play(&lease, &[Say::Guess(9), Say::Guess(10), text("I stop.")]);
    world.accept(&episode, &lease);
    (lease, episode)
}

/// A game that bisection wins with its third guess.
fn won(world: &World) -> (Lease, Episode) {
    for seed in 0.. {
        let lease = world.lease(7, 2, seed);
        let turns = world.bisection(&lease);
        let episode = world.play(&lease, &turns);
        if turns.len() == 3 && episode.reward == 1.0 {
            world.accept(&episode, &lease);
            return (lease, episode);
        }
    }
    unreachable!("bisection wins most games")
}

fn frames() -> World {
    World::new(json!({"name": "frames"}))
}

/// A frame, and an answer whose first digit is right and whose second is wrong.
fn half_right(world: &World) -> (Lease, Episode) {
    let lease = world.lease(7, 2, 5);
    let solution = world.environment.solution(&lease.task, lease.seed).expect("fits");
    let answer = solution.expect("known").answer;
    let wrong = if answer.ends_with('0') { '1' } else { '0' };
    let episode = world.play(&lease, &[text(&format!("{}{wrong}", &answer[..1]))]);
    let audited = world.accept(&episode, &lease);
    assert_eq!((audited.score.reward, audited.score.milestones["digit_1"]), (0.5, true));
    (lease, episode)
}

/// What is wrong with a forgery's refusal, if anything is.
fn misjudged(
    world: &World,
    (lease, mut episode): (Lease, Episode),
    (name, forge, code): (&str, Forge, &str),
) -> Option<String> {
    forge(world, &lease, &mut episode);
    match world.audit(&episode, &lease) {
        Ok(_) => Some(format!("{name}: accepted")),
        Err(rejected) if rejected.reason.code() != code => {
            let (reason, found) = (&rejected.reason, rejected.reason.code());
            Some(format!("{name}: {found}, not {code} ({reason})"))
        }
        Err(rejected) => {
            let line = rejected.reason.to_string();
            assert!(!line.contains('\n') && rejected.episode.is_some(), "{line}");
            None
        }
    }
}

#[test]
fn every_forgery_is_refused_with_its_own_name() {
    let world = world();
    let wrong = FORGERIES.iter().filter_map(|(name, base, forge, code)| {
        let base = match base {
            Base::Lost => lost(&world),
            Base::Won => won(&world),
        };
        misjudged(&world, base, (name, *forge, code))
    });
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_forgery_of_images_and_answers_is_refused_with_its_own_name() {
    let world = frames();
    let wrong = images::FORGERIES
        .iter()
        .filter_map(|(name, forge, code)| {
            misjudged(&world, half_right(&world), (name, *forge, code))
        })
        .collect::<Vec<String>>();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn an_image_in_a_game_that_shows_none_is_refused() {
    let world = world();
    let (lease, mut episode) = lost(&world);
    let image = Image::new(32, 32, vec![7; 3072]).expect("an image");
    (episode.reset_images, episode.images) = (vec![image.digest()], vec![image]);
    rechain(&mut episode);
    assert_eq!(code(world.audit(&episode, &lease)), (RungName::Tokens, "unrenderable"));
}

#[test]
fn bytes_that_claim_a_larger_image_than_they_hold_are_refused() {
    let world = frames();
    let (lease, episode) = half_right(&world);
    let body = episode.encode().expect("encodes");
    // One width and one height of 64, and the count of the columns of pixels after them.
    let sides = [[64_u8, 0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 64, 0, 0, 0]].concat();
    let at = body.windows(sides.len()).rposition(|window| window == sides).expect("sides");
    for side in [0_u32, 65, 4096, 4097, u32::MAX] {
        for place in [at, at + 12] {
            let mut bomb = body.clone();
            bomb[place..place + 4].copy_from_slice(&side.to_le_bytes());
            let open = Standing::Open(Box::new(lease.clone()));
            let verdict = world.audit_bytes(EpisodeId::of_body(&bomb), &bomb, &open, 0);
            assert_eq!(code(verdict), (RungName::Frame, "bad_frame"), "{side}");
        }
    }
}

fn code(result: Result<learner::audit::Audited, Box<Rejected>>) -> (RungName, &'static str) {
    result.expect_err("refused").reason.name()
}

#[test]
fn bytes_that_are_not_the_announced_episode_are_refused() {
    let world = world();
    let (lease, episode) = lost(&world);
    let body = episode.encode().expect("encodes");
    let id = EpisodeId::of_body(&body);
    let open = Standing::Open(Box::new(lease));
    let audit = |id, body: &[u8]| code(world.audit_bytes(id, body, &open, 0));
    assert_eq!(audit(EpisodeId(other()), &body), (RungName::Frame, "id_mismatch"));
    let mut flipped = body.clone();
    flipped[100] ^= 1;
    assert_eq!(audit(id, &flipped), (RungName::Frame, "id_mismatch"));
    for cut in [0, 1, 50, body.len() - 1] {
        let cut = &body[..cut];
        assert_eq!(audit(EpisodeId::of_body(cut), cut), (RungName::Frame, "bad_frame"));
    }
    let mut longer = body.clone();
    longer.push(0);
    assert_eq!(audit(EpisodeId::of_body(&longer), &longer), (RungName::Frame, "bad_frame"));
}

#[test]
fn answers_to_leases_that_do_not_wait_for_one_are_refused() {
    let world = world();
    let (lease, episode) = lost(&world);
    let body = episode.encode().expect("encodes");
    let id = EpisodeId::of_body(&body);
    let audit = |standing: &Standing, behind| code(world.audit_bytes(id, &body, standing, behind));
    assert_eq!(audit(&Standing::Unknown, 0), (RungName::Lease, "lease_unknown"));
    assert_eq!(audit(&Standing::Spent, 0), (RungName::Lease, "lease_spent"));
    let open = Standing::Open(Box::new(lease.clone()));
    assert_eq!(audit(&open, 1), (RungName::Lease, "stale_policy"));
    let elsewhere = LeaseId { group: 1, generation: 0 };
    let another = Standing::Open(Box::new(Lease { id: elsewhere, ..lease }));
    assert_eq!(audit(&another, 0), (RungName::Lease, "lease_mismatch"));
}

#[test]
fn limits_are_the_learners() {
    let wide = world();
    let (lease, episode) = lost(&wide);
    let audit = |limits| {
        let world = World::with(json!({"name": "guess"}), limits, RewardProtocol::Environment);
        code(world.audit(&episode, &lease))
    };
    let limits = EpisodeLimits {
        max_tool_rounds: 3,
        max_completion: 60,
        on_malformed: OnMalformed::Observe,
    };
    assert_eq!(audit(limits), (RungName::Tokens, "over_budget"));
    let limits = EpisodeLimits {
        max_tool_rounds: 1,
        max_completion: 2000,
        on_malformed: OnMalformed::Observe,
    };
    assert_eq!(audit(limits), (RungName::Calls, "permit_mismatch"));
}

#[test]
fn a_call_that_the_limits_forbid_cannot_be_said_to_have_run() {
    let limits = EpisodeLimits {
        max_tool_rounds: 1,
        max_completion: 2000,
        on_malformed: OnMalformed::Observe,
    };
    let world = World::with(json!({"name": "guess"}), limits, RewardProtocol::Environment);
    let lease = world.lease(0, 0, 3);
    let mut episode = world.play(&lease, &[Say::Guess(9), Say::Guess(10)]);
    world.accept(&episode, &lease);
    let row = &mut episode.trace[1];
    (row.kind, row.observation) = (CallKind::Ok, "lower".into());
    rechain(&mut episode);
    assert_eq!(code(world.audit(&episode, &lease)), (RungName::Calls, "permit_mismatch"));
}

#[test]
fn a_recorders_refusal_cannot_be_reworded() {
    let world = world();
    let lease = world.lease(0, 0, 3);
    let turns =
        [text("<tool_call>\nnot json\n</tool_call>"), text(&call("gues", json!({}))), text("no")];
    let honest = world.play(&lease, &turns);
    world.accept(&honest, &lease);
    let reworded = |row: usize, observation: &str| {
        let mut episode = honest.clone();
        episode.trace[row].observation = observation.into();
        rebuild(&world, &lease, &mut episode);
        code(world.audit(&episode, &lease))
    };
    let hint = r#"{"error": "the number is 4"}"#;
    assert_eq!(reworded(0, hint), (RungName::Replay, "replay_observation"));
    assert_eq!(reworded(1, hint), (RungName::Trace, "trace_refusal_text"));
}

/// Every value of `json`, by its path.
fn leaves(json: &Value, path: String, found: &mut Vec<String>) {
    match json {
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                leaves(item, format!("{path}/{index}"), found);
            }
        }
        Value::Object(object) => {
            for (key, value) in object {
                leaves(value, format!("{path}/{key}"), found);
            }
        }
        _ => found.push(path),
    }
}

/// Another value of the same type.
fn altered(path: &str, value: &Value) -> Value {
    match value {
        Value::Bool(flag) => json!(!flag),
        Value::Number(number) if number.is_f64() => {
            json!(number.as_f64().unwrap_or_default() + 0.25)
        }
        Value::Number(number) if path.starts_with("/loss_mask") => {
            json!(1 - number.as_u64().unwrap_or_default())
        }
        Value::Number(number) => json!(number.as_u64().unwrap_or_default() ^ 1),
        Value::String(text) if path.ends_with("/finish") => {
            json!(if text == "stop" { "length" } else { "stop" })
        }
        Value::String(text) if path.ends_with("/kind") => {
            json!(if text == "Ok" { "Raised" } else { "Ok" })
        }
        Value::String(text) if path == "/end" => {
            json!(if text == "done" { "turns" } else { "done" })
        }
        Value::String(text) if path.ends_with("/pixels") => {
            let first = if text.starts_with('A') { "B" } else { "A" };
            json!(format!("{first}{}", &text[1..]))
        }
        Value::String(text) if text.len() == 64 => {
            let first = if text.starts_with('0') { "1" } else { "0" };
            json!(format!("{first}{}", &text[1..]))
        }
        Value::String(text) => json!(format!("{text}x")),
        other => other.clone(),
    }
}

#[test]
fn altering_any_one_value_of_an_episode_is_refused() {
    let (guess, frames) = (world(), frames());
    let played = [lost(&guess), won(&guess), half_right(&frames)];
    for ((lease, episode), world) in played.into_iter().zip([&guess, &guess, &frames]) {
        let json = serde_json::to_value(&episode).expect("JSON");
        let mut paths = Vec::new();
        leaves(&json, String::new(), &mut paths);
        let mut refused = std::collections::BTreeMap::new();
        for path in &paths {
            // Whether these are true is for a forward pass to say.
            if path.contains("/logp_") {
                continue;
            }
            let mut forged = json.clone();
            let value = forged.pointer_mut(path).expect("a leaf");
            *value = altered(path, value);
            let forged: Episode = match serde_json::from_value(forged) {
                Ok(forged) => forged,
                // A size that its pixels do not have is no image.
                Err(_) if path.ends_with("/width") || path.ends_with("/height") => continue,
                Err(error) => panic!("{path}: {error}"),
            };
            assert_ne!(forged, episode, "{path}");
            // An episode that cannot even be encoded never travels.
            if forged.encode().is_err() {
                continue;
            }
            match world.audit(&forged, &lease) {
                Ok(_) => panic!("{path} was altered and accepted"),
                Err(rejected) => *refused.entry(rejected.reason.code()).or_insert(0) += 1,
            }
        }
        assert!(refused.len() >= 15, "{refused:?}");
    }
}
