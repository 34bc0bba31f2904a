//! Time of reading tool calls out of hostile text, at three sizes: it must grow as the size does.
//!
//! `cargo bench -p policy --bench tool_calls` prints, for each dialect and pattern, nanoseconds a byte at
//! 256 KiB, 512 KiB and 1 MiB, and the ratio of the last to the first: 1 is linear, 4 is quadratic.

use std::{hint::black_box, time::Instant};

use policy::chat::{Dialect, ParseRules, read_calls};
use serde_json::Map;

const SIZES: [usize; 3] = [1 << 18, 1 << 19, 1 << 20];

/// Nested, repeated and unclosed blocks, and strings that run over block ends.
const PATTERNS: [(&str, &str); 12] = [
    ("unclosed blocks", "<tool_call>"),
    ("ends without blocks", "</tool_call>"),
    ("repeated blocks", "<tool_call>a</tool_call>"),
    ("good calls", "<tool_call>{\"name\":\"f\",\"arguments\":{\"n\":[1,2]}}</tool_call>\n"),
    ("unclosed strings", "<tool_call>{\"name\":\"f\",\"arguments\":{\"s\":\"</tool_call>"),
    ("strings over ends", "<tool_call>[\",\",\"</tool_call>,"),
    ("open brackets", "<tool_call>{\"a\":[[[[[[[["),
    ("open thoughts", "<think>"),
    ("ends of thoughts", "</think>"),
    ("unclosed parameters", "<tool_call><function=f><parameter=s>"),
    ("false parameter ends", "<tool_call><function=f><parameter=s></parameter>x</tool_call>"),
    (
        "good tagged calls",
        "<tool_call><function=f><parameter=s>x</parameter></function></tool_call>",
    ),
];

fn main() {
    println!(
        "{:22} {:13} {:>9} {:>9} {:>9}  ratio",
        "pattern", "dialect", "256 KiB", "512 KiB", "1 MiB"
    );
    for (name, unit) in PATTERNS {
        for dialect in [Dialect::Json, Dialect::FunctionTags] {
            let rules = ParseRules { dialect, opens_think: false, schemas: Map::new() };
            let per_byte = SIZES.map(|size| {
                let text = unit.repeat(size / unit.len());
                let best = (0..5).map(|_| {
                    let start = Instant::now();
                    black_box(read_calls(black_box(&text), &rules));
                    start.elapsed()
                });
                best.min().map_or(0.0, |time| time.as_secs_f64() * 1e9 / text.len() as f64)
            });
            println!(
                "{name:22} {:13} {:9.2} {:9.2} {:9.2}  {:.2}",
                format!("{dialect:?}"),
                per_byte[0],
                per_byte[1],
                per_byte[2],
                per_byte[2] / per_byte[0]
            );
        }
    }
}
