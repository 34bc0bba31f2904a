//! The page: plots, tables and episodes in one file that asks no network for anything.

use std::{collections::BTreeMap, fmt::Write as _};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use protocol::Digest;
use serde::Serialize;
use serde_json::{Value, json};
use terminal::Failure;

use super::{
    charts::{CHARTS, number, svg},
    episodes::{Browser, Shown},
    run::RunData,
};

const EPISODES: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// What became of leases, in the manifest's words and for people.
const LEASES: &[(&str, &str)] = &[
    ("granted", "granted"),
    ("submitted", "answered"),
    ("failed", "failed"),
    ("expired", "expired"),
    ("accepted", "episodes accepted"),
    ("rejected", "episodes refused"),
    ("duplicates", "sent twice"),
    ("late", "too late"),
    ("equivocations", "answered twice, differently"),
    ("groups_completed", "groups completed"),
    ("groups_dropped", "groups dropped"),
    ("joins", "joins of actors"),
    ("turned_away", "turned away"),
    ("losses", "actors lost"),
    ("cut_off", "actors cut off"),
];

/// What the page's script reads.
#[derive(Serialize)]
struct Data<'a> {
    runs: usize,
    episodes: Vec<&'a Shown>,
    images: BTreeMap<&'a str, &'a str>,
}

/// The page of one run, or of two beside each other.
pub(super) fn page(runs: &[&RunData], browsers: &[Browser]) -> Result<String, Failure> {
    let names: Vec<String> = runs.iter().map(|run| escape(&run.name())).collect();
    // Nothing is fetched, and nothing runs but this script, whatever stands in an episode.
    let script = STANDARD.encode(Digest::of(SCRIPT.as_bytes()).0);
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:; \
         style-src 'unsafe-inline'; script-src 'sha256-{script}'; base-uri 'none'; form-action 'none'\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>{} - Rollcall</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n",
        names.join(" and ")
    );
    heading(&mut page, runs);
    let compared = if runs.len() > 1 { " compared" } else { "" };
    let _ = write!(page, "<section id=\"plots\"><h2>Plots</h2>\n<div class=\"plots{compared}\">\n");
    let mut plots = 0;
    for chart in CHARTS {
        if let Some(plot) = svg(chart, runs)? {
            plots += 1;
            let _ = writeln!(page, "<figure id=\"plot-{}\">{plot}</figure>", chart.name);
        }
    }
    if plots == 0 {
        page.push_str("<p>No step has been made yet.</p>\n");
    }
    page.push_str("</div></section>\n");
    tables(&mut page, runs);
    let shown: usize = browsers.iter().map(|it| it.episodes.len()).sum();
    let of: usize = browsers.iter().map(|it| it.of).sum();
    if shown > 0 {
        let count = format!("{shown} of {of}, spread over the run.");
        page.push_str(&EPISODES.replace("{count}", &count));
    }
    let images = browsers.iter().flat_map(|it| &it.images);
    let data = Data {
        runs: runs.len(),
        episodes: browsers.iter().flat_map(|it| &it.episodes).collect(),
        images: images.map(|(name, url)| (name.as_str(), url.as_str())).collect(),
    };
    // The only way out of a script element.
    let data = serde_json::to_string(&data).map_err(Failure::fault)?.replace('<', "\\u003c");
    let _ = write!(
        page,
        "<script type=\"application/json\" id=\"data\">{data}</script>\n<script>{SCRIPT}</script>\n\
         </body>\n</html>\n"
    );
    Ok(page)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::String(text) => escape(text),
        Value::Number(it) => it.as_f64().map_or_else(|| it.to_string(), number),
        other => escape(&other.to_string()),
    }
}

fn heading(body: &mut String, runs: &[&RunData]) {
    for run in runs {
        let manifest = &run.manifest;
        let _ = write!(body, "<header><h1>{}</h1>\n<p class=\"facts\">", escape(&run.name()));
        let facts = [
            ("", &manifest["status"]),
            ("", &manifest["method"]),
            ("run ", &manifest["run"]),
            ("model ", &manifest["model"]["architecture"]),
            ("environment ", &manifest["environment"]["name"]),
            ("device ", &manifest["host"]["device"]),
            ("started ", &manifest["started_at"]),
            ("ended ", &manifest["ended_at"]),
        ];
        let shown = facts.iter().filter(|(_, value)| !value.is_null());
        for (what, value) in shown {
            let value = text(value);
            let short: String = value.chars().take(40).collect();
            let _ = write!(body, "<span>{what}{short}</span> ");
        }
        if manifest.is_null() {
            body.push_str("<span>unfinished: no manifest yet</span>");
        }
        if let Some(error) = manifest["error"].as_str() {
            let _ = write!(body, "<br><strong>{}</strong>", escape(error));
        }
        body.push_str("</p></header>\n");
    }
}

/// A table with a column a run; nothing where no run has a row of it.
fn table(body: &mut String, title: &str, runs: &[&RunData], rows: &[(String, Vec<String>)]) {
    let rows: Vec<_> =
        rows.iter().filter(|(_, cells)| cells.iter().any(|cell| cell != "-")).collect();
    if rows.is_empty() {
        return;
    }
    let _ = write!(body, "<table><caption>{title}</caption>");
    if runs.len() > 1 {
        body.push_str("<tr><th></th>");
        for run in runs {
            let _ = write!(body, "<th>{}</th>", escape(&run.name()));
        }
        body.push_str("</tr>");
    }
    for (name, cells) in rows {
        let _ = write!(body, "<tr><th>{}</th>", escape(name));
        for cell in cells {
            let _ = write!(body, "<td>{cell}</td>");
        }
        body.push_str("</tr>");
    }
    body.push_str("</table>\n");
}

fn tables(body: &mut String, runs: &[&RunData]) {
    body.push_str("<section id=\"tables\"><h2>Numbers</h2>\n<div class=\"tables\">\n");
    let cells = |of: &dyn Fn(&RunData) -> Value| -> Vec<String> {
        runs.iter().map(|run| text(&of(run))).collect()
    };
    let at = |pointer: &str| {
        let pointer = format!("/{pointer}");
        cells(&|run| run.manifest.pointer(&pointer).cloned().unwrap_or_default())
    };
    // The manifest has the last word, and the metrics have the last so far.
    let now = |pointer: &str, name: &str| {
        cells(&|run| {
            let written = run.manifest.pointer(&format!("/{pointer}")).filter(|it| !it.is_null());
            written.cloned().unwrap_or_else(|| json!(run.series.last(name)))
        })
    };
    let results: Vec<(String, Vec<String>)> = [
        ("success before", "evaluation/before/success"),
        ("success after", "evaluation/after/success"),
        ("reward before", "evaluation/before/reward"),
        ("reward after", "evaluation/after/reward"),
        ("steps", "steps"),
        ("updates", "result/updates"),
        ("loss", "result/loss"),
        ("accuracy before", "result/accuracy/0/code_acc"),
        ("accuracy after", "result/accuracy/1/code_acc"),
        ("seconds", "result/seconds"),
        ("best adapter at step", "best_adapter/step"),
        ("groups with different rewards", "update_evidence/mixed_reward_groups"),
        ("steps with a gradient", "update_evidence/nonzero_gradient_steps"),
        ("largest change of a parameter", "update_evidence/max_abs_parameter_delta"),
        ("tasks trained on", "task_coverage/consumed_unique_tasks"),
        ("tasks in the data", "task_coverage/training_pool_rows"),
    ]
    .into_iter()
    .map(|(name, pointer)| (name.to_owned(), at(pointer)))
    .collect();
    table(body, "Results", runs, &results);
    let leases: Vec<(String, Vec<String>)> = LEASES
        .iter()
        .map(|(key, name)| {
            let name_of = format!("leases/{key}");
            ((*name).to_owned(), now(&name_of, &name_of))
        })
        .collect();
    table(body, "Leases and actors", runs, &leases);
    let tests = ["deficit_max", "deficit_mean", "logp_gap_max", "logp_gap_mean"];
    let bounds: Vec<(String, Vec<String>)> = tests
        .into_iter()
        .flat_map(|test| {
            let most = format!("sampling/{test}");
            [
                (format!("{test}, bound"), at(&format!("sampling_bounds/0/bounds/{test}"))),
                (format!("{test}, most of a step"), cells(&|run| json!(run.most(&most)))),
            ]
        })
        .collect();
    table(body, "Audit, rung 9: margins", runs, &bounds);
    let rejections: Vec<_> = runs.iter().map(|run| run.rejections()).collect();
    let mut names: Vec<&String> = rejections.iter().flat_map(|it| it.keys()).collect();
    names.sort_unstable();
    names.dedup();
    let refused: Vec<(String, Vec<String>)> = names
        .into_iter()
        .map(|name| {
            let count =
                |it: &BTreeMap<String, u64>| it.get(name).copied().unwrap_or_default().to_string();
            (name.clone(), rejections.iter().map(count).collect())
        })
        .collect();
    table(body, "Refused by the audit", runs, &refused);
    let accepted = |run: &RunData| run.series.last("leases/accepted").unwrap_or_default() > 0.0;
    if refused.is_empty() && runs.iter().any(|run| accepted(run)) {
        body.push_str("<p>The audit refused no episode.</p>\n");
    }
    body.push_str("</div></section>\n");
}
