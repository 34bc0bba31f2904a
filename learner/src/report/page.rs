//! The page: plots, tables and episodes in one file that asks no network for anything.

use std::fmt::Write as _;

use serde_json::Value;
use terminal::Failure;

use super::{
    charts::{CHARTS, number, svg},
    episodes::Browser,
    run::RunData,
};

const HEAD: &str = include_str!("page.html");
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

/// The page of one run, or of two beside each other.
pub(super) fn page(runs: &[&RunData], browser: &Browser) -> Result<String, Failure> {
    let names: Vec<String> = runs.iter().map(|run| escape(&run.name())).collect();
    let mut body = String::new();
    heading(&mut body, runs);
    body.push_str("<section id=\"plots\"><h2>Plots</h2>\n<div class=\"plots\">\n");
    let mut plots = 0;
    for chart in CHARTS {
        if let Some(plot) = svg(chart, runs)? {
            plots += 1;
            let _ = writeln!(body, "<figure id=\"plot-{}\">{plot}</figure>", chart.name);
        }
    }
    if plots == 0 {
        body.push_str("<p>No step has been made yet.</p>\n");
    }
    body.push_str("</div></section>\n");
    tables(&mut body, runs);
    if !browser.episodes.is_empty() {
        let _ = write!(
            body,
            "<section id=\"episodes\"><h2>Episodes</h2>\n<p>{} of {} accepted episodes. Sampled tokens are coloured by \
             their probability under the policy that sampled them, external ones are grey.</p>\n\
             <div class=\"browser\"><nav id=\"list\"></nav><article id=\"episode\"></article></div></section>\n",
            browser.episodes.len(),
            browser.of
        );
    }
    let data = serde_json::to_string(browser).map_err(Failure::fault)?;
    // The only way out of a script element.
    let data = data.replace('<', "\\u003c");
    Ok(HEAD
        .replace("{title}", &names.join(" and "))
        .replace("{style}", STYLE)
        .replace("{script}", SCRIPT)
        .replace("{body}", &body)
        .replace("{data}", &data))
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
        .map(|(key, name)| ((*name).to_owned(), at(&format!("leases/{key}"))))
        .collect();
    table(body, "Leases and actors", runs, &leases);
    let rejections: Vec<_> = runs.iter().map(|run| run.rejections()).collect();
    let mut names: Vec<&String> = rejections.iter().flat_map(|it| it.keys()).collect();
    names.sort_unstable();
    names.dedup();
    let refused: Vec<(String, Vec<String>)> = names
        .into_iter()
        .map(|name| {
            let count = |it: &std::collections::BTreeMap<String, u64>| {
                it.get(name).copied().unwrap_or_default().to_string()
            };
            (name.clone(), rejections.iter().map(count).collect())
        })
        .collect();
    table(body, "Refused by the audit, by reason", runs, &refused);
    let accepted = |run: &RunData| run.number("leases/accepted").unwrap_or_default() > 0.0;
    if refused.is_empty() && runs.iter().any(|run| accepted(run)) {
        body.push_str("<p>The audit refused no episode.</p>\n");
    }
    body.push_str("</div></section>\n");
}
