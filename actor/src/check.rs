//! `actor check`: is this environment fit to train on?

use std::path::Path;

use environments::{Determinism, EnvironmentSpec, EpisodeKey, Recorder, Spent, probe};
use policy::vision::Rgb;
use protocol::{Digest, Image, LeaseId, RunId, Split, Task};
use terminal::{Failure, print_line};

/// Examines an environment, given as [`EnvironmentSpec::from_argument`] takes it. The images that an
/// episode of seed 0 shows are written to the folder `images`, where there is one.
pub(crate) fn run(argument: &str, task: &str, images: Option<&Path>) -> Result<(), Failure> {
    let spec = EnvironmentSpec::from_argument(argument).map_err(Failure::mistake)?;
    let task = Task {
        id: "check".into(),
        prompt: String::new(),
        fields: task.to_owned(),
        split: Split::Train,
    };
    spec.check_task(&task)
        .map_err(|e| Failure::Mistake(format!("{e}; give a row's task object with --task")))?;
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
    if description.answers {
        print_line("answer       the text of a turn without calls");
    }
    let shown = first_images(&spec, &task)?;
    for (index, image) in shown.iter().enumerate() {
        let (width, height) = (image.width(), image.height());
        print_line(&format!("image        {width} x {height}, {}", image.digest()));
        if let Some(folder) = images {
            write_png(image, &folder.join(format!("{index}.png")))?;
        }
    }
    let limits = spec.limits();
    print_line(&format!(
        "limits       {} calls a turn, {} characters an observation{}, {} a reset{}",
        limits.calls_per_turn,
        limits.observation_chars,
        limits.observation_tokens.map_or(String::new(), |most| format!(" and {most} tokens")),
        limits.reset_chars,
        limits.episode_seconds.map_or(String::new(), |most| format!(", {most} s an episode")),
    ));
    let report = probe(&spec, &task, 0).map_err(Failure::fault)?;
    print_line(&format!(
        "probe        {} generated calls, {}8 resets with one seed, {}reused",
        report.calls,
        if report.answered { "an answer, " } else { "" },
        if report.isolated.is_some() { "interleaved, " } else { "" },
    ));
    print_line(&format!("resets       {}", times(report.resets)));
    print_line(&format!("calls        {}", times(report.made)));
    for finding in report.findings() {
        print_line(&format!("finding      {finding}"));
    }
    if report.isolated.is_none() {
        print_line(
            "finding      the server plays one episode at a time: start it with a capacity of as many as \
             all actors and the learner's replay have at once",
        );
    }
    match (description.determinism, report.verdict()) {
        (Determinism::Deterministic, Determinism::Deterministic) => {
            print_line("verdict      fit to train on: the learner plays every episode again");
            Ok(())
        }
        (Determinism::Deterministic, Determinism::Recorded) => Err(Failure::Fault(
            "the environment says that it is deterministic, and the probe found it recorded".into(),
        )),
        (Determinism::Recorded, _) => {
            print_line(
                "verdict      recorded: the learner cannot play its episodes again and takes the actors' \
                 word for them, where the recipe sets evidence.allow_recorded",
            );
            Ok(())
        }
    }
}

fn times(spent: Spent) -> String {
    let milliseconds = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    format!(
        "{:.2} ms in the mean, {:.2} ms at most",
        milliseconds(spent.mean()),
        milliseconds(spent.longest)
    )
}

/// What the reset of an episode with seed 0 shows.
fn first_images(spec: &EnvironmentSpec, task: &Task) -> Result<Vec<Image>, Failure> {
    let (run, lease) = (RunId(Digest::of(b"")), LeaseId { group: 0, generation: 0 });
    let key = EpisodeKey { run, lease, task, seed: 0 };
    let environment = spec.open().map_err(Failure::fault)?;
    let recorder = Recorder::start(environment, key, spec.limits()).map_err(Failure::fault)?;
    Ok(recorder.images().to_vec())
}

fn write_png(image: &Image, path: &Path) -> Result<(), Failure> {
    let bytes = Rgb::from(image).to_png().map_err(Failure::fault)?;
    let wrong = |e| Failure::Mistake(format!("--images: {}: {e}", path.display()));
    std::fs::write(path, bytes).map_err(wrong)
}
