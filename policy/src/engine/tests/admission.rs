//! Bounded cache, bounded batch, and nobody starves.

use super::*;

fn tight(pass: Pass, max_tokens: usize) -> EngineConfig {
    EngineConfig { max_tokens, ..limits(pass) }
}

#[test]
fn a_tight_cache_makes_calls_wait_and_changes_no_result() {
    for pass in BOTH {
        let rollouts: Vec<_> = (0..12).map(|i| (0, Rollout::new("a", i))).collect();
        let expected = play(&mut engine(qwen3(), limits(pass)), &rollouts);
        // The longest rollout needs about 80 places: two or three fit.
        let mut engine = engine(qwen3(), tight(pass, 224));
        let found = play(&mut engine, &rollouts);
        for (found, expected) in found.iter().zip(&expected) {
            let ids = |results: &[Generated]| -> Vec<_> {
                results.iter().map(|g| (g.ids.clone(), g.context)).collect()
            };
            assert_eq!(ids(found), ids(expected), "{pass:?}");
        }
    }
}

#[test]
fn the_cache_never_holds_more_than_its_places() {
    for pass in BOTH {
        let mut engine = engine(qwen3(), tight(pass, 160));
        let mut done = 0;
        for i in 0..20 {
            let rollout = Rollout::new("b", i);
            let id = engine.open(rollout.policy, rollout.key, rollout.sampling).expect("open");
            engine.append(id, &rollout.prompt).expect("append");
            engine.generate(id, 30, &[]).expect("generate");
        }
        while engine.has_work() {
            for generated in engine.step().expect("step") {
                done += 1;
                engine.close(generated.sequence);
            }
            assert!(engine.used_tokens() <= 160, "{}", engine.used_tokens());
        }
        assert_eq!(done, 20);
        assert_eq!(engine.stats().fed_again, 0);
    }
}

#[test]
fn idle_streams_make_room_only_when_nothing_else_can_run() {
    for pass in BOTH {
        let mut engine = engine(qwen3(), tight(pass, 128));
        let start = |engine: &mut Engine, number: u32| {
            let id = engine.open(policy("a"), key(&format!("{number}")), PLAIN).expect("open");
            engine.append(id, &ids(number, 40)).expect("append");
            engine.generate(id, 10, &[]).expect("generate");
            id
        };
        let finish = |engine: &mut Engine| {
            let mut ended = Vec::new();
            while engine.has_work() {
                ended.extend(engine.step().expect("step"));
            }
            ended
        };
        // Two streams wait for their tools and hold the cache; the third must still run.
        let (first, second) = (start(&mut engine, 1), start(&mut engine, 2));
        let ended: Vec<SequenceId> = finish(&mut engine).iter().map(|g| g.sequence).collect();
        assert_eq!(ended, [first, second]);
        start(&mut engine, 3);
        finish(&mut engine);
        assert_eq!(engine.stats().fed_again, 0);
        // The first comes back, is fed again, and goes on as if nothing had happened.
        engine.append(first, &[5, 6]).expect("append");
        engine.generate(first, 10, &[]).expect("generate");
        let resumed = contents(&finish(&mut engine));
        assert!(engine.stats().fed_again > 0);
        let mut roomy = super::engine(qwen3(), limits(pass));
        let same = start(&mut roomy, 1);
        finish(&mut roomy);
        roomy.append(same, &[5, 6]).expect("append");
        roomy.generate(same, 10, &[]).expect("generate");
        let expected = contents(&finish(&mut roomy));
        assert_eq!((&resumed[0].ids, resumed[0].context), (&expected[0].ids, expected[0].context));
    }
}

#[test]
fn at_most_max_batch_calls_run_and_the_rest_follow_in_order() {
    let limits = EngineConfig { max_batch: 3, ..limits(Pass::Auto) };
    let mut engine = engine(qwen3(), limits);
    let mut order = Vec::new();
    let opened: Vec<SequenceId> = (0..10)
        .map(|i| {
            let id = engine.open(policy("a"), key(&format!("{i}")), PLAIN).expect("open");
            engine.append(id, &ids(i, 5)).expect("append");
            engine.generate(id, 4, &[]).expect("generate");
            id
        })
        .collect();
    while engine.has_work() {
        order.extend(engine.step().expect("step").into_iter().map(|g| g.sequence));
        assert!(engine.running.len() <= 3);
    }
    assert_eq!(order, opened);
    // Four steps for each batch of three.
    assert_eq!(engine.stats().passes, 16);
}

#[test]
fn a_stream_that_waits_for_its_tool_gives_its_place_to_another() {
    let limits = EngineConfig { max_batch: 1, ..limits(Pass::Auto) };
    let mut engine = engine(qwen3(), limits);
    let open = |engine: &mut Engine, name: &str| {
        let id = engine.open(policy("a"), key(name), PLAIN).expect("open");
        engine.append(id, &ids(1, 20)).expect("append");
        engine.generate(id, 2, &[]).expect("generate");
        id
    };
    let (first, second) = (open(&mut engine, "x"), open(&mut engine, "y"));
    let mut ended = Vec::new();
    while engine.has_work() {
        for generated in engine.step().expect("step") {
            ended.push(generated.sequence);
            if ended.len() == 1 {
                // The first comes back from its tool before the second has started.
                engine.append(first, &[1]).expect("append");
                engine.generate(first, 2, &[]).expect("generate");
            }
        }
    }
    // It holds places, so it goes first.
    assert_eq!(ended, [first, first, second]);
}

#[test]
fn closing_gives_everything_back() {
    for pass in BOTH {
        let mut engine = engine(qwen3(), limits(pass));
        let mut opened = Vec::new();
        for i in 0..5 {
            let id = engine.open(policy("a"), key(&format!("{i}")), PLAIN).expect("open");
            engine.append(id, &ids(i / 2, 30)).expect("append");
            engine.generate(id, 20, &[]).expect("generate");
            opened.push(id);
        }
        for _ in 0..4 {
            engine.step().expect("step");
        }
        assert!(engine.used_tokens() > 0);
        opened.into_iter().for_each(|id| engine.close(id));
        assert!(!engine.has_work());
        assert!(engine.step().expect("nothing to do").is_empty());
        engine.drop_adapter(&policy("a")).expect("closed");
        assert_eq!(engine.used_tokens(), 0);
    }
}
