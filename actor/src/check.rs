//! `actor check`: is this environment fit to train on?

use std::path::Path;

use environments::{EnvironmentSpec, EpisodeKey, Recorder, probe};
use policy::vision::Rgb;
use protocol::{Digest, Image, LeaseId, RunId, Split, Task};
use terminal::{Failure, print_line};

/// Examines an environment, given as [`EnvironmentSpec::from_argument`] takes it. The images that an
/// episode of seed 0 shows are written to the folder `images`, where there is one.
pub(crate) fn run(argument: &str, task: &str, images: Option<&Path>) -> Result<(), Failure> {
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
    let report = probe(&spec, &task, 0).map_err(Failure::fault)?;
    print_line(&format!(
        "probe        {} generated calls, {}8 resets with one seed, interleaved, reused",
        report.calls,
        if report.answered { "an answer, " } else { "" }
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
