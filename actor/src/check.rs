//! `actor check`: is this environment fit to train on?

use environments::{EnvironmentSpec, probe};
use protocol::{Split, Task};
use serde_json::Value;
use terminal::{Failure, print_line};

/// Examines the environment of a recipe, or one given as JSON text.
pub(crate) fn run(argument: &str, task: &str) -> Result<(), Failure> {
    let text = if argument.trim_start().starts_with('{') {
        argument.to_owned()
    } else {
        std::fs::read_to_string(argument)
            .map_err(|e| Failure::Mistake(format!("{argument}: {e}; give a recipe or JSON text")))?
    };
    let value: Value =
        serde_json::from_str(&text).map_err(|e| Failure::Mistake(format!("{argument}: {e}")))?;
    let section = value.get("environment").unwrap_or(&value);
    let spec = EnvironmentSpec::parse(section).map_err(Failure::mistake)?;
    let description = spec.describe().map_err(Failure::fault)?;
    print_line(&format!("environment  {} ({})", description.name, description.version));
    print_line(&format!("settings     {}", spec.to_json()));
    print_line(&format!("digest       {}", spec.digest()));
    print_line(&format!("replay       {}", description.determinism));
    let range = &description.reward_range;
    print_line(&format!("reward       {} to {}", range.start(), range.end()));
    print_line(&format!("milestones   {}", description.milestones.join(", ")));
    for tool in &description.tools {
        print_line(&format!("tool         {}", tool.to_json()));
    }
    let task = Task {
        id: "check".into(),
        prompt: String::new(),
        fields: task.to_owned(),
        split: Split::Train,
    };
    spec.check_task(&task)
        .map_err(|e| Failure::Mistake(format!("{e}; give a row's task object with --task")))?;
    let report = probe(&spec, &task, 0).map_err(Failure::fault)?;
    print_line(&format!(
        "probe        {} generated calls, 8 resets with one seed, interleaved, reused",
        report.calls
    ));
    for finding in report.findings() {
        print_line(&format!("finding      {finding}"));
    }
    if report.verdict() != description.determinism {
        return Err(Failure::Fault(format!(
            "the environment says that it is {}, and the probe found it {}",
            report.claimed,
            report.verdict()
        )));
    }
    print_line("verdict      fit to train on");
    Ok(())
}
