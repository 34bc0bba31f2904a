//! Cached steps over sequences of unequal lengths give what the full pass gives, however the ids are
//! cut into steps and whoever shares the step or the past.
#![allow(clippy::unwrap_used)]

mod support;

use policy::{
    device::DeviceChoice,
    model::{
        Adapter, Checkpoint, Decoder, Feed, FullInput, KvCache, KvId, LoadDtype, LoraConfig,
        ModelError, TargetModules,
    },
};
use support::{own_root, values};

fn load(name: &str) -> Decoder {
    let device = DeviceChoice::Cpu.open().unwrap();
    let dir = own_root().join("checkpoints").join(name);
    Checkpoint::open(dir).unwrap().load(&device, LoadDtype::File).unwrap()
}

fn decoder() -> Decoder {
    load("qwen3-yarn-bias-shards")
}

/// With recurrent layers.
fn hybrid() -> Decoder {
    load("qwen3_5-text")
}

fn ids(count: usize, salt: u32) -> Vec<u32> {
    (0..count as u32).map(|i| (i * 11 + salt * 17 + i * i) % 48).collect()
}

fn full(decoder: &Decoder, adapter: Option<&Adapter>, ids: &[u32]) -> Vec<f32> {
    let input = FullInput { ids, batch: 1, mask: None, hidden: false, images: &[] };
    let logits = values(decoder.forward(adapter, input).unwrap().logits);
    logits[(ids.len() - 1) * 48..].to_vec()
}

fn near(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    for (f, e) in found.iter().zip(expected) {
        assert!((f - e).abs() < 1e-4, "{f} and {e}");
    }
}

fn feed(sequence: KvId, ids: &[u32]) -> Feed<'_> {
    Feed { sequence, ids, logits: true, images: &[] }
}

#[test]
fn ragged_steps_equal_full_passes() {
    [decoder(), hybrid()].into_iter().for_each(|decoder| ragged_steps(&decoder));
}

fn ragged_steps(decoder: &Decoder) {
    let settings = LoraConfig {
        r: 2,
        alpha: 4.0,
        target_modules: TargetModules::AllLinear,
        use_rslora: false,
    };
    let adapter = Adapter::init(&settings, decoder, 1).unwrap();
    for adapter in [None, Some(&adapter)] {
        let mut cache = KvCache::new(decoder, 200);
        let rows: Vec<Vec<u32>> = (0..4).map(|salt| ids(20 + 5 * salt as usize, salt)).collect();
        let sequences: Vec<KvId> = rows.iter().map(|_| cache.open()).collect();
        let cuts = [[0, 1, 20], [9, 24, 25], [3, 4, 5], [34, 35, 35]];
        for step in 0..3 {
            let fed: Vec<(KvId, &[u32], usize)> = (sequences.iter().zip(&rows).zip(&cuts))
                .map(|((&sequence, row), cut)| {
                    let from = if step == 0 { 0 } else { cut[step - 1] };
                    (sequence, &row[from..cut[step]], cut[step])
                })
                .collect();
            let some: Vec<_> = fed.iter().filter(|(_, ids, _)| !ids.is_empty()).collect();
            let feeds: Vec<Feed<'_>> = some.iter().map(|(s, ids, _)| feed(*s, ids)).collect();
            let logits = decoder.advance(adapter, &mut cache, &feeds).unwrap();
            assert_eq!(logits.rows().len(), some.len());
            for (found, (sequence, _, len)) in logits.rows().zip(some) {
                let row = sequences.iter().position(|s| s == sequence).unwrap();
                near(found, &full(decoder, adapter, &rows[row][..*len]));
            }
        }
    }
}

#[test]
fn a_forked_state_goes_on_by_itself_and_is_not_cut_back() {
    let decoder = hybrid();
    let mut cache = KvCache::new(&decoder, 200);
    assert!(cache.recurrent());
    let prompt = ids(21, 5);
    let parent = cache.open();
    decoder.advance(None, &mut cache, &[feed(parent, &prompt)]).unwrap();
    let child = cache.fork(parent).unwrap();
    let fresh = cache.open();
    let tails = [ids(4, 20), ids(1, 21), ids(30, 22)];
    let feeds = [feed(child, &tails[0]), feed(parent, &tails[1]), feed(fresh, &tails[2])];
    let logits = decoder.advance(None, &mut cache, &feeds).unwrap();
    let pasts = [&prompt[..], &prompt[..], &[]];
    for ((found, past), tail) in logits.rows().zip(pasts).zip(&tails) {
        near(found, &full(&decoder, None, &[past, tail].concat()));
    }
    let error = cache.truncate(child, 21).unwrap_err().to_string();
    assert!(error.contains("25 ids") && error.contains("21"), "{error}");
    assert_eq!(cache.len(child).unwrap(), 25);
    cache.truncate(child, 25).unwrap();
    cache.truncate(child, 0).unwrap();
    // One id each: a sequence with a past beside one without.
    let one = ids(1, 30);
    let feeds = [feed(parent, &one), feed(child, &one)];
    let logits = decoder.advance(None, &mut cache, &feeds).unwrap();
    let expected = [[&prompt[..], &tails[1], &one].concat(), one.clone()];
    for (found, ids) in logits.rows().zip(&expected) {
        near(found, &full(&decoder, None, ids));
    }
}

#[test]
fn a_forked_past_is_shared_and_stays_unharmed() {
    let decoder = decoder();
    let mut cache = KvCache::new(&decoder, 64);
    let prompt = ids(21, 5);
    let parent = cache.open();
    decoder.advance(None, &mut cache, &[feed(parent, &prompt)]).unwrap();
    let used = cache.used();
    let children: Vec<KvId> = (0..3).map(|_| cache.fork(parent).unwrap()).collect();
    assert_eq!(cache.used(), used, "a fork takes no room");
    let tails: Vec<Vec<u32>> = (0..3).map(|salt| ids(4, 20 + salt)).collect();
    let feeds: Vec<Feed<'_>> = children.iter().zip(&tails).map(|(&c, t)| feed(c, t)).collect();
    let logits = decoder.advance(None, &mut cache, &feeds).unwrap();
    for (found, tail) in logits.rows().zip(&tails) {
        near(found, &full(&decoder, None, &[prompt.clone(), tail.clone()].concat()));
    }
    cache.close(children[0]);
    cache.truncate(children[1], 10).unwrap();
    let other = ids(6, 40);
    let feeds = [feed(children[1], &other), feed(parent, &other)];
    let logits = decoder.advance(None, &mut cache, &feeds).unwrap();
    let expected = [[&prompt[..10], &other].concat(), [&prompt[..], &other].concat()];
    for (found, ids) in logits.rows().zip(&expected) {
        near(found, &full(&decoder, None, ids));
    }
    for sequence in [parent, children[1], children[2]] {
        cache.close(sequence);
    }
    assert_eq!(cache.used(), 0);
}

#[test]
fn a_refused_step_changes_nothing() {
    let decoder = decoder();
    let mut cache = KvCache::new(&decoder, 40);
    let (a, b) = (cache.open(), cache.open());
    let some = ids(10, 1);
    decoder.advance(None, &mut cache, &[feed(a, &some)]).unwrap();
    let used = cache.used();
    let gone = cache.fork(a).unwrap();
    cache.close(gone);
    let wrong: Vec<Vec<Feed<'_>>> = vec![
        vec![],
        vec![feed(b, &some), feed(a, &[])],
        vec![feed(b, &some), feed(b, &some)],
        vec![feed(b, &some), feed(a, &[48])],
        vec![feed(b, &some), feed(gone, &some)],
    ];
    for feeds in wrong {
        assert!(decoder.advance(None, &mut cache, &feeds).is_err());
        assert_eq!((cache.len(a).unwrap(), cache.len(b).unwrap()), (10, 0));
    }
    let long = ids(31, 2);
    let full = decoder.advance(None, &mut cache, &[feed(b, &long)]).unwrap_err();
    assert!(matches!(full, ModelError::CacheFull { needed: 31, free: 30, capacity: 40 }), "{full}");
    assert_eq!(cache.used(), used);
    let mut cache = KvCache::new(&decoder, 1000);
    let sequence = cache.open();
    let long = ids(65, 2);
    let error = decoder.advance(None, &mut cache, &[feed(sequence, &long)]).unwrap_err();
    assert!(matches!(error, ModelError::TooLong { len: 65, max: 64 }), "{error}");
}
