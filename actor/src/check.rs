//! `actor check`: is this environment fit to train on?

use environments::{EnvironmentSpec, probe};
use protocol::{Split, Task};
use terminal::{Failure, print_line};

/// Examines an environment, given as [`EnvironmentSpec::from_argument`] takes it.
pub(crate) fn run(argument: &str, task: &str) -> Result<(), Failure> {
    let spec = EnvironmentSpec::from_argument(argument).map_err(Failure::mistake)?;
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
