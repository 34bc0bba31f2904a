//! The numbers that follow from a recipe: how long its prompts are, how many ids it samples.

use environments::Recorder;
use policy::{
    chat::ChatFormat,
    vision::{PromptImages, episode_prompt},
};
use protocol::{Image, Lease, LeaseId, NoiseKey, PolicyDigest, RunId};

use crate::{
    curriculum::episode_seed,
    files::Derived,
    recipe::{Recipe, RecipeError, TaskRow},
};

/// Prompts that are rendered to find out how long they are; of a larger data set, so many evenly
/// spread.
const RENDERED: usize = 256;

pub(super) fn derive(
    recipe: &Recipe,
    run: RunId,
    reader: (&ChatFormat, Option<&PromptImages>),
    train: &[TaskRow],
    eval: &[TaskRow],
) -> Result<Derived, RecipeError> {
    let training = &recipe.training;
    let rows: Vec<&TaskRow> = train.iter().chain(eval).collect();
    let stride = rows.len().div_ceil(RENDERED).max(1);
    let mut longest_prompt_tokens = 0;
    let mut prompts_rendered = 0;
    for row in rows.iter().step_by(stride) {
        let length = prompt_length(recipe, run, reader, row).map_err(|problem| {
            RecipeError::conflict(
                "dataset",
                format!("task {:?} cannot be started: {problem}", row.task.id),
                "mend the row",
            )
        })?;
        longest_prompt_tokens = length.max(longest_prompt_tokens);
        prompts_rendered += 1;
    }
    let groups_per_step = training.groups_per_step();
    let rollouts_per_step = u64::from(groups_per_step) * u64::from(training.num_generations);
    let completion = training.max_completion_length;
    let groups = f64::from(groups_per_step) * f64::from(training.max_steps);
    Ok(Derived {
        groups_per_step,
        rollouts_per_step,
        rollouts: rollouts_per_step * u64::from(training.max_steps),
        epochs: groups / train.len().max(1) as f64,
        rollouts_per_evaluation: recipe
            .evaluation
            .as_ref()
            .map_or(0, |it| u64::from(it.num_generations) * eval.len() as u64),
        longest_prompt_tokens,
        prompts_rendered,
        longest_episode_tokens: longest_prompt_tokens + completion as usize,
        sampled_tokens_per_step: rollouts_per_step * u64::from(completion),
    })
}

/// Resets the environment as the first group of a row would and renders the prompt.
fn prompt_length(
    recipe: &Recipe,
    run: RunId,
    (format, images): (&ChatFormat, Option<&PromptImages>),
    row: &TaskRow,
) -> Result<usize, String> {
    let id = LeaseId { group: 0, generation: 0 };
    let lease = Lease {
        run,
        id,
        attempt: 0,
        task: row.task.clone(),
        seed: episode_seed(run, row, 0),
        noise_key: NoiseKey::derive(&run, id),
        policy: PolicyDigest(recipe.sha256),
        sampling: recipe.training.sampling(),
        deadline_ms: 0,
    };
    let environment = recipe.environment.open().map_err(|fault| fault.to_string())?;
    let recorder = Recorder::reset(environment, &lease, recipe.environment.limits())
        .map_err(|fault| fault.to_string())?;
    let shown: Vec<&Image> = recorder.images().iter().collect();
    let prompt = episode_prompt(format, images, &row.task.prompt, recorder.reset_text(), &shown)
        .map_err(|error| error.to_string())?;
    Ok(prompt.len())
}
