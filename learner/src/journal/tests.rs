//! Journals that were cut, changed or mixed up come back as a prefix or not at all, and always say so.

use std::path::Path;

use protocol::{
    ActorId, Digest, EpisodeId, LeaseAttempt, LeaseId, PolicyDigest, RunId, Sampling, Split, Task,
    folder::Disk,
};

use super::*;
use crate::leases::GroupOrder;

fn segment_file(dir: &Path, number: u64) -> PathBuf {
    segment_path(Disk::at(dir).as_ref(), number)
}

fn run() -> RunId {
    RunId(Digest::of(b"run"))
}

fn order() -> GroupOrder {
    GroupOrder {
        task: Task {
            id: "t".into(),
            prompt: "Spiel mit mir. 🎲".into(),
            fields: r#"{"split":"train"}"#.into(),
            split: Split::Train,
        },
        seed: u64::MAX,
        policy: PolicyDigest(Digest::of(b"policy")),
        sampling: Sampling { temperature: 0.6, top_k: 20, top_p: 0.95, min_p: 0.02 },
        generations: 4,
        deadline_ms: 600_000,
    }
}

const BODIES: [&[u8]; 3] = [b"one", &[0; 60], b""];

fn records() -> Vec<Record<'static>> {
    let actor = ActorId(Digest::of(b"actor"));
    vec![
        Record::Policy {
            step: 3,
            policy: PolicyDigest(Digest::of(b"policy")),
            adapter: Digest::of(b"adapter"),
            bytes: 77,
            archived: true,
        },
        Record::Group { group: 1 << 63, order: order() },
        Record::Accepted {
            actor,
            attempt: 2,
            behind: 1,
            device: "cpu, 8 threads",
            body: BODIES[0],
        },
        Record::Rejected {
            actor,
            lease: LeaseId { group: 1 << 63, generation: 3 },
            attempt: 0,
            behind: 0,
            id: EpisodeId(Digest::of(b"forged")),
            reason: "trace_chain",
            body: Some(BODIES[1]),
        },
        Record::Rejected {
            actor,
            lease: LeaseId { group: 0, generation: 0 },
            attempt: 0,
            behind: 0,
            id: EpisodeId(Digest::of(b"kept no more")),
            reason: "bad_frame",
            body: None,
        },
        Record::Dropped { group: 7 },
        Record::Granted {
            actor,
            leases: vec![
                LeaseAttempt { id: LeaseId { group: 1 << 40, generation: 7 }, attempt: 2 },
                LeaseAttempt { id: LeaseId { group: 3, generation: u32::MAX }, attempt: 0 },
            ],
        },
        Record::Committed(Commit {
            number: 3,
            steps: 2,
            rounds: 1,
            checkpoint: Digest::of(b"checkpoint"),
            evidence_rows: 9,
            evidence_bytes: 1 << 40,
            evidence_head: Digest::of(b"head"),
            metrics_bytes: 77,
            metrics_sha256: Digest::of(b"metrics"),
        }),
        Record::Resumed { commit: 3 },
    ]
}

/// Writes all records into segments of at most `limit` bytes.
fn write(dir: &Path, limit: u64) -> JournalRecord {
    let mut journal = Journal::create_limited(dir.to_owned(), run(), limit).expect("created");
    for record in records() {
        journal.append(&record).expect("appended");
    }
    journal.sync().expect("synced");
    journal.so_far()
}

/// Reads to the end or to the first error.
fn read(dir: &Path) -> (Vec<Entry>, Result<JournalRecord, JournalError>) {
    let mut entries = Vec::new();
    let mut reader = match JournalReader::open(dir, run()) {
        Ok(reader) => reader,
        Err(error) => return (entries, Err(error)),
    };
    loop {
        match reader.read() {
            Ok(Some(entry)) => entries.push(entry),
            Ok(None) => return (entries, Ok(reader.so_far())),
            Err(error) => return (entries, Err(error)),
        }
    }
}

#[test]
fn records_come_back_as_they_were_written_and_in_order() {
    for (limit, segments) in [(SEGMENT_BYTES, 1), (300, 8), (1, 9)] {
        let dir = tempfile::tempdir().expect("a directory");
        let journal = dir.path().join("journal");
        let written = write(&journal, limit);
        let (entries, so_far) = read(&journal);
        assert_eq!(so_far.expect("whole"), written);
        assert_eq!(written.segments, segments);
        let bytes: u64 = (0..segments)
            .map(|n| std::fs::metadata(segment_file(&journal, n)).expect("there").len())
            .sum();
        assert_eq!(bytes, written.bytes);
        let found: Vec<_> = entries.iter().map(|it| it.record().expect("a record")).collect();
        assert_eq!(found, records());
        for entry in &entries {
            let again = read_at(&journal, run(), entry.position).expect("there");
            assert_eq!(again.record(), entry.record());
        }
    }
}

#[test]
fn a_journal_cut_at_any_byte_goes_on_after_its_last_whole_record() {
    let dir = tempfile::tempdir().expect("a directory");
    let whole = dir.path().join("whole");
    write(&whole, 400);
    let count = reader::count_segments(Disk::at(&whole).as_ref()).expect("segments");
    let last = std::fs::read(segment_file(&whole, count - 1)).expect("read");
    let before = read(&whole).0.iter().filter(|it| it.position.segment + 1 < count).count();
    for cut in 0..last.len() {
        let journal = dir.path().join(format!("cut-{cut}"));
        std::fs::create_dir(&journal).expect("created");
        for number in 0..count - 1 {
            std::fs::copy(segment_file(&whole, number), segment_file(&journal, number))
                .expect("copied");
        }
        std::fs::write(segment_file(&journal, count - 1), &last[..cut]).expect("written");
        let (entries, strict) = read(&journal);
        let clean = strict.is_ok();
        let (mut journalled, recovered) = Journal::recover(&journal, run()).expect("a prefix");
        assert_eq!(recovered.records, entries.len() as u64);
        assert!(entries.len() >= before);
        assert!(clean == (recovered.cut == 0) || cut < SEGMENT_HEADER, "cut at {cut}");
        journalled.append(&Record::Dropped { group: 9 }).expect("appended");
        journalled.sync().expect("synced");
        let (again, so_far) = read(&journal);
        assert_eq!(so_far.expect("whole again"), journalled.so_far());
        assert_eq!(again.len(), entries.len() + 1);
        assert_eq!(again.last().expect("one").record(), Ok(Record::Dropped { group: 9 }));
    }
}

#[test]
fn a_flipped_byte_is_refused_or_its_record_is_cut_off_and_counted() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = dir.path().join("journal");
    write(&journal, 400);
    for number in 0..reader::count_segments(Disk::at(&journal).as_ref()).expect("segments") {
        let path = segment_file(&journal, number);
        let bytes = std::fs::read(&path).expect("read");
        for at in 0..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x40;
            std::fs::write(&path, &flipped).expect("written");
            let (entries, result) = read(&journal);
            assert!(result.is_err() && entries.len() < records().len(), "{number} byte {at}");
            match Journal::recover(&journal, run()) {
                Ok((_, recovered)) => assert!(recovered.cut > 0, "{number} byte {at}"),
                Err(JournalError::Damaged { path: named, .. }) => {
                    // A changed chain at a segment's end shows at the start of the next.
                    assert!(named == path || named == segment_file(&journal, number + 1));
                }
                Err(error) => panic!("{number} byte {at}: {error}"),
            }
            std::fs::write(&path, &bytes).expect("written");
        }
    }
}

#[test]
fn segments_that_are_missing_swapped_or_of_another_run_are_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = dir.path().join("journal");
    write(&journal, 1);
    let error = |run| {
        let mut reader = JournalReader::open(&journal, run).map_err(|error| error.to_string())?;
        while reader.read().map_err(|error| error.to_string())?.is_some() {}
        Ok::<_, String>(())
    };
    let other = RunId(Digest::of(b"other"));
    assert!(error(other).expect_err("refused").contains("a segment of another run"));
    let (one, two) = (segment_file(&journal, 1), segment_file(&journal, 2));
    let kept = std::fs::read(&one).expect("read");
    std::fs::copy(&two, &one).expect("copied");
    assert!(error(run()).expect_err("refused").contains("under another's name"));
    std::fs::remove_file(&one).expect("removed");
    let missing = error(run()).expect_err("refused");
    assert!(missing.contains("00000001.segment: the segment is missing"), "{missing}");
    std::fs::write(&one, kept).expect("written");
    std::fs::write(journal.join("notes.txt"), "").expect("written");
    assert!(error(run()).expect_err("refused").contains("notes.txt: no file of a journal"));
}

#[test]
fn a_claimed_length_allocates_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = dir.path().join("journal");
    write(&journal, SEGMENT_BYTES);
    let path = segment_file(&journal, 0);
    let mut bytes = std::fs::read(&path).expect("read");
    bytes.truncate(SEGMENT_HEADER);
    // Even with a check that fits: the bytes are not there.
    bytes.extend(record_header(&genesis(&run()), 3, u32::MAX));
    bytes.extend([1; 64]);
    std::fs::write(&path, bytes).expect("written");
    let error = read(&journal).1.expect_err("refused").to_string();
    assert!(error.contains("a record over the limit"), "{error}");
}
