//! What a forger works with: all hashes can be mended, as nothing here is secret.

use std::{fs, path::Path};

use learner::{
    files::read_manifest,
    journal::{Entry, Journal, JournalReader, Record},
};
use protocol::{Digest, Episode, EpisodeId, RunId};
use serde_json::{Value, json};

pub(crate) fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir(to).expect("created");
    for entry in fs::read_dir(from).expect("listed") {
        let entry = entry.expect("an entry");
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).expect("copied");
        }
    }
}

/// Edits the manifest as JSON.
pub(crate) fn manifest(run: &Path, edit: impl FnOnce(&mut Value)) {
    let path = run.join("manifest.json");
    let mut value: Value = serde_json::from_slice(&fs::read(&path).expect("read")).expect("JSON");
    edit(&mut value);
    fs::write(path, value.to_string()).expect("written");
}

pub(crate) fn replace(run: &Path, name: &str, from: &str, to: &str) {
    let path = run.join(name);
    let text = fs::read_to_string(&path).expect("read");
    let edited = text.replacen(from, to, 1);
    assert_ne!(text, edited, "{name} has no {from}");
    fs::write(path, edited).expect("written");
}

pub(crate) fn lines(run: &Path) -> Vec<String> {
    let text = fs::read_to_string(run.join("evidence.jsonl")).expect("read");
    text.lines().map(str::to_owned).collect()
}

pub(crate) fn write_lines(run: &Path, lines: &[String]) {
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(run.join("evidence.jsonl"), text).expect("written");
}

/// Writes lines with their chain rebuilt and the manifest's head set to it, as a careful forger would.
pub(crate) fn reseal(run: &Path, lines: &[String]) {
    let id = read_manifest(run).expect("there").run;
    let mut head = Digest::of_parts("rollcall-evidence-v1", &[&id.0.0]);
    let mut sealed = Vec::new();
    for line in lines {
        // {"previous":"<64>"
        let line = format!("{{\"previous\":\"{head}\"{}", &line[13 + 64 + 1..]);
        head = Digest::of(line.as_bytes());
        sealed.push(line);
    }
    write_lines(run, &sealed);
    manifest(run, |it| {
        it["evidence"]["head"] = json!(head);
        it["evidence"]["rows"] = json!(sealed.len());
    });
}

/// Edits the one line that has `mark` and reseals the log.
pub(crate) fn reline(run: &Path, mark: &str, from: &str, to: &str) {
    let mut all = lines(run);
    let line = all.iter_mut().find(|line| line.contains(mark)).expect("a line");
    let edited = line.replacen(from, to, 1);
    assert_ne!(*line, edited, "{line} has no {from}");
    *line = edited;
    reseal(run, &all);
}

pub(crate) fn entries(run: &Path) -> (RunId, Vec<Entry>) {
    let id = read_manifest(run).expect("there").run;
    let mut reader = JournalReader::open(run.join("journal"), id).expect("a journal");
    let mut all = Vec::new();
    while let Some(entry) = reader.read().expect("whole") {
        all.push(entry);
    }
    (id, all)
}

/// Writes the journal anew, with its chain, after `edit`; the manifest's account of it too.
pub(crate) fn rejournal(run: &Path, edit: impl FnOnce(&mut Vec<Record<'_>>)) {
    let (id, entries) = entries(run);
    let mut records: Vec<Record<'_>> =
        entries.iter().map(|entry| entry.record().expect("a record")).collect();
    edit(&mut records);
    fs::remove_dir_all(run.join("journal")).expect("removed");
    let mut journal = Journal::create(run.join("journal"), id).expect("created");
    for record in &records {
        journal.append(record).expect("appended");
    }
    journal.sync().expect("synced");
    manifest(run, |it| it["journal"] = json!(journal.so_far()));
}

/// The bytes that answer a lease, and their id.
pub(crate) fn answer(run: &Path, group: u64, generation: u32) -> (EpisodeId, Episode, Vec<u8>) {
    let (_, entries) = entries(run);
    entries
        .iter()
        .find_map(|entry| match entry.record().expect("a record") {
            Record::Accepted { body, .. } => {
                let episode = Episode::decode(body).expect("an episode");
                let found = (episode.lease.group, episode.lease.generation) == (group, generation);
                found.then(|| (EpisodeId::of_body(body), episode, body.to_vec()))
            }
            _ => None,
        })
        .expect("an answer")
}

/// Puts other bytes in the place of an accepted episode, everywhere.
pub(crate) fn substitute(run: &Path, old: EpisodeId, body: &[u8]) {
    rejournal(run, |records| {
        for record in records {
            if let Record::Accepted { body: there, .. } = record
                && EpisodeId::of_body(there) == old
            {
                // The records live as long as this closure's caller; the bytes as long as the test.
                *there = Box::leak(body.to_vec().into_boxed_slice());
            }
        }
    });
    let new = EpisodeId::of_body(body).to_string();
    reline(run, &old.to_string(), &old.to_string(), &new);
}

pub(crate) fn swap_bytes(run: &Path, name: &str, find: impl Fn(&[u8]) -> usize) {
    let path = run.join(name);
    let mut bytes = fs::read(&path).expect("read");
    let at = find(&bytes);
    bytes[at] ^= 1;
    fs::write(path, bytes).expect("written");
}

pub(crate) fn middle(bytes: &[u8]) -> usize {
    bytes.len() / 2
}

pub(crate) fn first_of(run: &Path, folder: &str) -> String {
    let mut names: Vec<String> = fs::read_dir(run.join(folder))
        .expect("listed")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    format!("{folder}/{}", names[0])
}
