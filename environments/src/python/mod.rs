//! `{"python": "module:Class"}`: a class as TRL's `environment_factory` takes it, unchanged, in
//! processes of its own.
//!
//! The module is a file in the recipe's folder, or in one that [`FOLDERS_VARIABLE`] names; a section that
//! came over the network is looked up in the latter only. Its SHA-256 is part of the environment's digest,
//! so that everyone plays the same file; what it imports is not.
//!
//! Every episode is played by a fresh instance in a process that was forked right after the module was
//! imported: neither fields nor module state nor random generators can leak from one episode into
//! another. Files and what else lies outside the process can. It is no sandbox: the code runs with
//! your rights, without your environment variables.
//!
//! Reward is `get_reward()`, or the field `reward`, or what the section's `reward` names. A field `done`
//! that is `True` ends the episode. Milestones there are none.

mod process;

use std::{
    collections::BTreeSet,
    env,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, OnceLock, PoisonError},
    time::Duration,
};

use protocol::{Digest, Task};
use serde_json::{Map, Value, json};

pub use self::process::PYTHON_VARIABLE;
use self::process::{Process, Tool};
use crate::{
    Blueprint, Description, Environment, Fault, Raised, Reply, Score, SpecError, ToolSpec,
    fields::{Fields, task_fields},
    hosted::{self, Common, Host},
};

/// The key that such sections have in place of `name`.
pub const KEY: &str = "python";

/// Names folders, separated by `:`, in which modules are looked for.
pub const FOLDERS_VARIABLE: &str = "ROLLCALL_ENVIRONMENTS";

const VERSION: &str = "python-1";
/// How long a player may take to end after its episode.
const CLOSING: Duration = Duration::from_secs(5);

/// What a section says.
#[derive(Clone, Debug)]
struct Settings {
    /// As it stands in the section: `module:Class`.
    name: String,
    module: String,
    class: String,
    folder: PathBuf,
    file: PathBuf,
    sha256: Digest,
    /// The field, property or method that holds the reward, where it is not `get_reward` or `reward`.
    reward: Option<String>,
    common: Common,
    start_seconds: u64,
    memory_mib: u64,
    episodes_per_process: u64,
    /// Episodes at a time, each with processes of its own.
    processes: u64,
    variables: Vec<String>,
}

/// Reads a section whose module may lie in `base`.
pub(crate) fn parse(
    fields: &mut Fields<'_>,
    base: Option<&Path>,
) -> Result<Arc<dyn Blueprint>, SpecError> {
    let name = fields.text(KEY, "\"module:Class\"")?;
    let wrong = || SpecError::Value {
        field: "environment.python".into(),
        expected: "\"module:Class\", a class of a Python file beside the recipe".into(),
        found: crate::fields::shown(&name.into()),
    };
    let identifier = |text: &str| {
        let first = text.chars().next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
        first && text.len() <= 100 && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    let (module, class) = name.split_once(':').ok_or_else(wrong)?;
    if !identifier(class) || module.len() > 400 || !module.split('.').all(identifier) {
        return Err(wrong());
    }
    let (folder, file) = find(module, base)?;
    let source = std::fs::read(&file).map_err(|error| SpecError::Module {
        module: module.into(),
        reason: format!("{}: {error}", file.display()),
    })?;
    let sha256 = Digest::of(&source);
    if let Some(frozen) = fields.optional_text("sha256", "the SHA-256 of the module's file")?
        && frozen != sha256.to_string()
    {
        return Err(SpecError::Module {
            module: module.into(),
            reason: format!("{} has SHA-256 {sha256}, not {frozen}", file.display()),
        });
    }
    let reward = fields.optional_text("reward", "the name of a field or method of the class")?;
    if let Some(name) = reward
        && !identifier(name)
    {
        return Err(SpecError::Value {
            field: "environment.reward".into(),
            expected: "the name of a field or method of the class".into(),
            found: crate::fields::shown(&name.into()),
        });
    }
    let settings = Settings {
        name: name.into(),
        module: module.into(),
        class: class.into(),
        folder,
        file,
        sha256,
        reward: reward.map(str::to_owned),
        common: Common::parse(fields)?,
        start_seconds: fields.integer("start_seconds", 120, 1..=3600)?,
        memory_mib: fields.integer("memory_mib", 4096, 0..=1 << 24)?,
        episodes_per_process: fields.integer("episodes_per_process", 256, 1..=1_000_000)?,
        processes: fields.integer("processes", 256, 1..=1024)?,
        variables: fields.texts("variables", 64)?,
    };
    let hosts = Arc::new(Hosts {
        settings,
        idle: Mutex::default(),
        busy: Mutex::default(),
        freed: Condvar::new(),
    });
    Ok(Arc::new(Class { hosts, described: OnceLock::new() }))
}

/// The folder that `module` is imported from, and its file.
fn find(module: &str, base: Option<&Path>) -> Result<(PathBuf, PathBuf), SpecError> {
    let named = env::var_os(FOLDERS_VARIABLE).unwrap_or_default();
    let folders: Vec<PathBuf> = base
        .map(Path::to_owned)
        .into_iter()
        .chain(env::split_paths(&named).filter(|folder| !folder.as_os_str().is_empty()))
        .map(|folder| if folder.as_os_str().is_empty() { PathBuf::from(".") } else { folder })
        .collect();
    let path: PathBuf = module.split('.').collect();
    for folder in &folders {
        for file in
            [folder.join(&path).with_extension("py"), folder.join(&path).join("__init__.py")]
        {
            if let (true, Ok(folder), Ok(file)) =
                (file.is_file(), folder.canonicalize(), file.canonicalize())
            {
                return Ok((folder, file));
            }
        }
    }
    let shown: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
    let shown = if shown.is_empty() { "any folder".into() } else { shown.join(", ") };
    // Only a recipe of this machine's owner has a folder that counts.
    let beside = if base.is_some() { "put it beside the recipe or " } else { "" };
    Err(SpecError::Module {
        module: module.into(),
        reason: format!(
            "no file {}.py in {shown}; {beside}name its folder in {FOLDERS_VARIABLE}",
            path.display()
        ),
    })
}

impl Settings {
    fn fault(&self, during: &'static str, what: String) -> Fault {
        Fault::Process { environment: self.name.clone(), during, what }
    }

    fn version(&self) -> String {
        format!("{VERSION} {}", self.sha256)
    }

    fn describe(&self, tools: Vec<Tool>) -> Description {
        let tool = |tool: Tool| ToolSpec {
            name: tool.name,
            description: tool.description,
            parameters: tool.parameters,
            returns: tool.returns,
        };
        let tools = tools.into_iter().map(tool).collect();
        self.common.describe(&self.name, self.version(), tools)
    }
}

/// Processes that can play the class.
#[derive(Debug)]
struct Hosts {
    settings: Settings,
    /// Between episodes: nothing runs in them.
    idle: Mutex<Vec<Process>>,
    /// How many are in an episode.
    busy: Mutex<u64>,
    freed: Condvar,
}

/// A process that may be in an episode: one of as many as there may be.
#[derive(Debug)]
struct Place(Arc<Hosts>);

impl Drop for Place {
    fn drop(&mut self) {
        *self.0.busy.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.freed.notify_one();
    }
}

impl Hosts {
    fn start(&self) -> Result<(Process, Vec<Tool>), Fault> {
        let settings = &self.settings;
        let hello = json!({
            "op": "hello",
            "folder": settings.folder,
            "file": settings.file,
            "module": settings.module,
            "class": settings.class,
            "sha256": settings.sha256,
            "reward": settings.reward,
            "memory_mib": settings.memory_mib,
        });
        let patience = Duration::from_secs(settings.start_seconds);
        let started = Process::start(&settings.folder, &settings.variables)
            .and_then(|mut process| Ok((process.ask(hello, patience)?.tools, process)));
        let (tools, process) = started.map_err(|what| settings.fault("its start", what))?;
        Ok((process, tools))
    }

    /// Waits until there may be one more process, unless it is wanted `beside` those that there are.
    fn place(self: &Arc<Self>, beside: bool) -> Result<Place, Fault> {
        let most = self.settings.processes;
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        while *busy >= most {
            if beside {
                let what =
                    format!("{most} of its episodes are played, as many as environment.processes");
                return Err(Fault::Busy { environment: self.settings.name.clone(), what });
            }
            busy = self.freed.wait(busy).unwrap_or_else(PoisonError::into_inner);
        }
        *busy += 1;
        Ok(Place(self.clone()))
    }

    fn take(&self) -> Result<Process, Fault> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match idle {
            Some(process) => Ok(process),
            None => self.start().map(|(process, _)| process),
        }
    }

    /// Ends the episode of a process and keeps it for another one.
    fn give_back(&self, mut process: Process) -> Result<(), Fault> {
        process
            .ask(json!({"op": "close"}), CLOSING)
            .map_err(|what| self.settings.fault("the end of its episode", what))?;
        process.episodes += 1;
        if process.episodes < self.settings.episodes_per_process {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(process);
        }
        Ok(())
    }
}

/// A class in a recipe.
#[derive(Debug)]
struct Class {
    hosts: Arc<Hosts>,
    described: OnceLock<Result<Description, Fault>>,
}

impl Class {
    /// What the class is, asked once, with its claim to be deterministic put to the test.
    fn described(&self) -> Result<Description, Fault> {
        self.described.get_or_init(|| self.examine()).clone()
    }

    fn examine(&self) -> Result<Description, Fault> {
        let (process, tools) = self.hosts.start()?;
        self.hosts.idle.lock().unwrap_or_else(PoisonError::into_inner).push(process);
        hosted::tested(&self.hosts, self.hosts.settings.describe(tools))
    }
}

impl Host for Hosts {
    fn name(&self) -> &str {
        &self.settings.name
    }

    fn version(&self) -> String {
        self.settings.version()
    }

    fn common(&self) -> &Common {
        &self.settings.common
    }

    fn play(self: &Arc<Self>, description: Description, beside: bool) -> Box<dyn Environment> {
        Box::new(Episode { hosts: self.clone(), description, beside, process: None })
    }
}

impl Blueprint for Class {
    fn key(&self) -> &'static str {
        KEY
    }

    fn name(&self) -> &str {
        &self.hosts.settings.name
    }

    fn version(&self) -> String {
        self.hosts.settings.version()
    }

    fn folder(&self) -> Option<&Path> {
        Some(&self.hosts.settings.folder)
    }

    fn settings(&self) -> Map<String, Value> {
        let settings = &self.hosts.settings;
        let mut all = Map::new();
        all.insert("sha256".into(), json!(settings.sha256));
        if let Some(name) = &settings.reward {
            all.insert("reward".into(), json!(name));
        }
        all.extend(settings.common.settings());
        all.insert("start_seconds".into(), settings.start_seconds.into());
        all.insert("memory_mib".into(), settings.memory_mib.into());
        all.insert("episodes_per_process".into(), settings.episodes_per_process.into());
        all.insert("processes".into(), settings.processes.into());
        all.insert("variables".into(), json!(settings.variables));
        all
    }

    fn check_task(&self, task: &Task) -> Result<(), SpecError> {
        task_fields(task).map(|_| ())
    }

    fn open(&self) -> Result<Box<dyn Environment>, Fault> {
        Ok(self.hosts.play(self.described()?, false))
    }

    fn open_beside(&self) -> Result<Box<dyn Environment>, Fault> {
        Ok(self.hosts.play(self.described()?, true))
    }

    fn waits(&self) -> bool {
        true
    }

    fn score(&self, _: &BTreeSet<&str>) -> Option<Score> {
        None
    }

    fn score_claim(&self, reward: f64) -> Option<Score> {
        self.hosts.common().score(reward)
    }
}

/// An episode: a process from its first reset on.
struct Episode {
    hosts: Arc<Hosts>,
    description: Description,
    beside: bool,
    process: Option<(Process, Place)>,
}

impl Episode {
    fn ask(
        &mut self,
        during: &'static str,
        request: Value,
        patience: Duration,
    ) -> Result<process::Answer, Fault> {
        let settings = &self.hosts.settings;
        let Some((mut process, place)) = self.process.take() else {
            return Err(settings.fault(during, "there was no reset before it".into()));
        };
        // A process that failed is dropped, and all that runs below it with it.
        let answer = process.ask(request, patience).map_err(|what| settings.fault(during, what))?;
        self.process = Some((process, place));
        Ok(answer)
    }
}

impl Environment for Episode {
    fn describe(&self) -> &Description {
        &self.description
    }

    fn reset(&mut self, task: &Task, seed: u64) -> Result<Option<String>, Fault> {
        let given = json!({"id": task.id, "prompt": task.prompt, "seed": seed});
        let row = hosted::row(task, crate::spec::settings(given))?;
        if let Some((used, _)) = self.process.take() {
            self.hosts.give_back(used)?;
        }
        let place = self.hosts.place(self.beside)?;
        self.process = Some((self.hosts.take()?, place));
        let request = json!({"op": "reset", "seed": seed, "row": row});
        let patience = self.hosts.settings.common.reset();
        Ok(self.ask("reset", request, patience)?.text)
    }

    fn call(&mut self, tool: &str, arguments: &Map<String, Value>) -> Result<Reply, Fault> {
        let request = json!({"op": "call", "tool": tool, "arguments": arguments});
        let patience = self.hosts.settings.common.call();
        let answer = self.ask("a call", request, patience)?;
        let result = match answer.raised {
            Some(message) => Err(Raised(message)),
            None => Ok(answer.text.unwrap_or_default()),
        };
        Ok(Reply { result, reached: Vec::new(), done: answer.done })
    }

    fn score(&mut self) -> Result<Score, Fault> {
        let patience = self.hosts.settings.common.call();
        let answer = self.ask("its reward", json!({"op": "score"}), patience)?;
        let reward = answer.reward.ok_or_else(|| {
            self.hosts.settings.fault("its reward", "its reply holds no reward".into())
        })?;
        Host::score(self.hosts.as_ref(), reward)
    }
}

impl Drop for Episode {
    fn drop(&mut self) {
        if let Some((process, _place)) = self.process.take() {
            // A process that does not end its episode has been dropped, which is all that is left to do.
            drop(self.hosts.give_back(process));
        }
    }
}
