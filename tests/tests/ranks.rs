//! Ranks as processes: training online on several of them, and what becomes of a run when one of them is
//! lost.

use std::{fs, process::Command};

use serde_json::Value;
use tests::{Demo, finish, programs, start};

/// Values of an adapter's file.
fn values(demo: &Demo) -> Vec<f32> {
    let manifest = demo.manifest();
    let path = manifest["last_adapter"]["path"].as_str().expect("a path").to_owned();
    let bytes = fs::read(demo.run().join(path).join("adapter_model.safetensors")).expect("read");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("a length")) as usize;
    let (floats, _) = bytes[8 + header..].as_chunks::<4>();
    floats.iter().map(|float| f32::from_le_bytes(*float)).collect()
}

#[test]
fn an_online_run_over_ranks_trains_the_adapter_of_one_rank_and_is_audited() {
    let train = |ranks: &[&str]| {
        let demo = Demo::new(3);
        let mut train = Command::new(&programs().learner);
        train.arg("train").arg(demo.write());
        train.args(["--device", "cpu", "--json", "--local-actors", "1"]).args(ranks);
        let finished = finish(start(&mut train));
        assert!(finished.status.success(), "{}{}", finished.stdout, finished.stderr);
        // Only rank 0 speaks, and nobody repeats it.
        let ends = finished.stdout.lines().filter(|line| line.contains("\"event\":\"end\""));
        assert_eq!(ends.count(), 1, "{}", finished.stdout);
        demo
    };
    let one = train(&[]);
    let alone = values(&one);
    for count in ["2", "3"] {
        let demo = train(&["--nproc-per-node", count]);
        let off = alone.iter().zip(values(&demo)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        println!("{count} ranks: adapters differ by {off:.1e}");
        assert!(off <= 1e-5, "{count} ranks: {off}");
        let audit = finish(start(Command::new(&programs().learner).arg("audit").arg(demo.run())));
        assert!(audit.status.success(), "{}{}", audit.stdout, audit.stderr);
        let metrics = fs::read_to_string(demo.run().join("metrics.jsonl")).expect("metrics");
        let tokens = |text: &str| -> Vec<Value> {
            let rows = text.lines().map(|line| serde_json::from_str(line).expect("JSON"));
            rows.filter(|it: &Value| it["update_seconds"].is_number())
                .map(|it| it["completions/mean_length"].clone())
                .collect()
        };
        let own = fs::read_to_string(one.run().join("metrics.jsonl")).expect("metrics");
        assert_eq!(tokens(&metrics), tokens(&own), "the same episodes");
    }
}
